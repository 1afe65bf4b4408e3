"""Compiles the CPU kernels into the user's cache: `python -m engine.cpu.build`.

The library has a plain C interface and includes no torch header. It compiles in seconds and does not depend
on torch's ABI, so one build serves every torch version. (The headers of a torch extension alone take half a
minute to compile on two cores, and its arguments would be raw pointers too.) Each instruction set has its own
translation units and the library chooses between them at run time, so a cache on a shared home directory
serves different CPUs.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from common import compile as cxx
from common.compile import BuildError, Sources

SOURCE_DIR = Path(__file__).parent
COMMON_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=default",
    "-pthread",
    "-Wall",
]
AVX2 = ["-march=x86-64-v3", "-ffp-contract=fast"]
AVX512 = ["-march=x86-64-v4", "-ffp-contract=fast", "-mavx512vnni", "-mprefer-vector-width=512"]
BF16 = [*AVX512, "-mavx512bf16"]
AMX = [*BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"]
ISA_FLAGS = {"avx2": AVX2, "avx512": AVX512, "bf16": BF16, "amx": AMX}
"""Flags by the last word of a source file's name. Other files get the compiler's default target."""


def _units() -> list[Path]:
    """The translation units for this machine's architecture."""
    units = sorted(SOURCE_DIR.glob("*.cpp"))
    if platform.machine() == "x86_64":
        return units
    return [unit for unit in units if unit.stem.rpartition("_")[2] not in ISA_FLAGS]


def build() -> Path:
    """The path of the library, which is compiled first if it is not in the cache. Raises BuildError."""
    headers = sorted(SOURCE_DIR.glob("*.h"))
    return cxx.build(Sources("kernels", _units(), headers, COMMON_FLAGS, ISA_FLAGS))


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{build()}\n")
    except BuildError as error:
        sys.stderr.write(f"the CPU kernels cannot be built; plain torch is used instead: {error}\n")
        sys.exit(1)
