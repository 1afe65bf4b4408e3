"""Tests are skipped without kernels where there is no compiler, and fail where there is one."""

import pytest

from common.compile import BuildError
from engine.cpu.op import KernelsUnavailable
from tests.support import cpu_kernels


def test_kernels_that_do_not_compile_fail_their_tests(monkeypatch):
    def fail():
        raise KernelsUnavailable("a syntax error")

    monkeypatch.setattr(cpu_kernels, "machine_isas", fail)
    monkeypatch.setattr(cpu_kernels, "find_compiler", lambda: "g++")
    with pytest.raises(KernelsUnavailable, match="a syntax error"):
        cpu_kernels.packing_isas()


def test_without_a_compiler_tests_of_kernels_are_skipped(monkeypatch):
    def fail():
        raise KernelsUnavailable("no compiler")

    def find():
        raise BuildError("none")

    monkeypatch.setattr(cpu_kernels, "machine_isas", fail)
    monkeypatch.setattr(cpu_kernels, "find_compiler", find)
    with pytest.raises(pytest.skip.Exception, match="no CPU kernels: no compiler"):
        cpu_kernels.packing_isas()


def test_a_cpu_without_avx2_skips_tests_of_packed_products(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "machine_isas", lambda: ("base",))
    assert cpu_kernels.kernel_isas() == ("base",)
    with pytest.raises(pytest.skip.Exception, match="AVX2"):
        cpu_kernels.packing_isas()
