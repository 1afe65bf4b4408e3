"""The instruction sets that tests of the CPU's kernels use."""

from __future__ import annotations

import pytest

from common.compile import BuildError, find_compiler
from engine.cpu.op import KernelsUnavailable, machine_isas


def kernel_isas() -> tuple[str, ...]:
    """Those of this machine, the best one last. Without a compiler the test, or the module that calls this,
    is skipped. Kernels that a compiler cannot build raise KernelsUnavailable: skipped tests would hide it."""
    try:
        return machine_isas()
    except KernelsUnavailable as error:
        if _has_compiler():
            raise
        pytest.skip(f"no CPU kernels: {error}", allow_module_level=True)


def packing_isas() -> tuple[str, ...]:
    """Those of them that compute packed products, all but `base`. Skipped where there is none."""
    isas = kernel_isas()[1:]
    if not isas:
        pytest.skip("packed products need a CPU with AVX2", allow_module_level=True)
    return isas


def _has_compiler() -> bool:
    try:
        find_compiler()
    except BuildError:
        return False
    return True
