"""What our code uses of cuda.bindings.driver: parameters of functions, fields of structures, enums.

python -m tests.support.cuda_record    records the installed package's, by version (it needs no GPU)
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parents[1] / "data" / "cuda_bindings"
FUNCTIONS = (
    "cuInit", "cuDeviceGet", "cuDeviceGetCount", "cuDeviceGetAttribute", "cuDeviceGetUuid",
    "cuDeviceCanAccessPeer", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuCtxSynchronize",
    "cuMemGetAllocationGranularity",
    "cuMemCreate", "cuMemRelease", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle",
    "cuMemAddressReserve", "cuMemAddressFree", "cuMemMap", "cuMemUnmap", "cuMemSetAccess", "cuMemcpyAsync",
    "cuMemcpy2DAsync",
)  # fmt: skip
STRUCTURES = ("CUmemAllocationProp", "CUmemAccessDesc", "CUmemLocation", "CUuuid", "CUDA_MEMCPY2D")
ENUMS = (
    "CUmemAllocationType", "CUmemAllocationHandleType", "CUmemLocationType", "CUmemAccess_flags",
    "CUmemAllocationGranularity_flags", "CUdevice_attribute", "CUresult", "CUmemorytype",
)  # fmt: skip
LONG_ENUMS = {  # what is recorded of them
    "CUdevice_attribute": "VIRTUAL_MEMORY|POSIX|WITH_CUDA_VMM",
    "CUresult": "SUCCESS|INVALID_(VALUE|DEVICE|CONTEXT|HANDLE)$|OUT_OF_MEMORY|NOT_SUPPORTED|ILLEGAL_ADDRESS",
}

Record = dict[str, dict[str, list[str]]]


def recorded_version() -> str:
    """The newest version that is recorded."""
    return max(path.stem for path in RECORDS.glob("*.json"))


@cache
def recorded() -> Record:
    """By kind and name, what the recorded version has."""
    record: Record = json.loads((RECORDS / f"{recorded_version()}.json").read_text())
    return record


def read(driver: Any) -> Record:
    """The same of a module cuda.bindings.driver."""
    return {
        "functions": {name: _parameters(getattr(driver, name)) for name in FUNCTIONS},
        "structures": {name: _fields(getattr(driver, name)()) for name in STRUCTURES},
        "enums": {name: _members(getattr(driver, name), LONG_ENUMS.get(name, "")) for name in ENUMS},
    }


def _parameters(function: Any) -> list[str]:
    """Cython writes them into the first line of the docstring: `cuMemMap(ptr, size_t size, ...)`."""
    line = function.__doc__.strip().splitlines()[0]
    inside = re.sub(r"\[[^()]*?\](?=[,)\s]|$)", "", line[line.index("(") + 1 : line.rindex(")")])
    return [part.partition(":")[0].split()[-1] for part in inside.split(",") if part.strip()]


def _members(enum: Any, pattern: str) -> list[str]:
    return [name for name in enum.__members__ if re.search(pattern, name)]


def _fields(structure: Any) -> list[str]:
    return [name for name in dir(structure) if not name.startswith("_") and name != "getPtr"]


def main() -> None:
    from cuda.bindings import driver

    RECORDS.mkdir(exist_ok=True)
    path = RECORDS / f"{version('cuda-bindings')}.json"
    path.write_text(json.dumps(read(driver), indent=1) + "\n")


if __name__ == "__main__":
    main()
