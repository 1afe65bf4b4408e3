"""A pytest plugin: the kernels for AVX512-BF16 and AMX run on a CPU that has only AVX-512 with VNNI.

`pytest -p tests.emulation.plugin tests/engine/cpu` compiles the kernels again, with functions in place of the
instructions that the CPU may lack, and as if it had them all. This shows that their results are right, and
nothing of their speed. Only what runs in pytest's own process is emulated.
"""

from __future__ import annotations

from pathlib import Path

from common import compile as cxx
from engine.cpu import build as native
from engine.cpu import op

_HERE = Path(__file__).parent
_INSTRUCTIONS = _HERE / "instructions.h"
_EMULATED = [*native.AVX512, "-include", str(_INSTRUCTIONS)]


def _build() -> Path:
    """The path of the emulating library. Raises BuildError."""
    units = [unit for unit in sorted(native.SOURCE_DIR.glob("*.cpp")) if unit.name != "isa.cpp"]
    headers = [*sorted(native.SOURCE_DIR.glob("*.h")), _INSTRUCTIONS]
    flags = {**native.ISA_FLAGS, "bf16": _EMULATED, "amx": _EMULATED}
    common = [*native.COMMON_FLAGS, "-I", str(native.SOURCE_DIR)]
    return cxx.build(cxx.Sources("kernels-emulated", [*units, _HERE / "isa.cpp"], headers, common, flags))


op.build = _build
