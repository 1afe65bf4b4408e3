"""Compile the CPU kernels into the user's cache: `python -m engine.cpu.build`.

The library has a plain C interface and includes no torch header: it compiles in seconds, does not depend on
torch's ABI, and one build serves every torch version. (A torch extension was the obvious alternative: its
headers alone take half a minute on two cores, and the op's arguments are raw pointers either way.) Every
instruction set is its own translation unit, and the library chooses at run time, so a cache on a shared home
directory serves different CPUs.
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
AVX512 = ["-march=x86-64-v4", "-ffp-contract=fast", "-mavx512bf16", "-mprefer-vector-width=512"]
ISA_FLAGS: dict[str, list[str]] = {"avx2": ["-march=x86-64-v3", "-ffp-contract=fast"], "avx512": AVX512}
"""By the last word of a source file's name; other files get the compiler's default target."""
ISA_FLAGS["amx"] = [*AVX512, "-mamx-tile", "-mamx-bf16"]


def _units() -> list[Path]:
    """Translation units for this machine's architecture."""
    units = sorted(SOURCE_DIR.glob("*.cpp"))
    if platform.machine() == "x86_64":
        return units
    return [unit for unit in units if unit.stem.rpartition("_")[2] not in ISA_FLAGS]


def build() -> Path:
    """The library's path, compiled now if it is not in the cache. Raises BuildError."""
    headers = sorted(SOURCE_DIR.glob("*.h"))
    return cxx.build(Sources("kernels", _units(), headers, COMMON_FLAGS, ISA_FLAGS))


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{build()}\n")
    except BuildError as error:
        sys.stderr.write(f"CPU kernels not built, plain torch takes over: {error}\n")
        sys.exit(1)
