"""RMSNorm in C++ against its definition in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from engine.config import EngineConfig
from engine.cpu.module_replacements import CpuReplacements
from engine.cpu.norm import CpuNorm
from engine.cpu.op import current_isa, machine_isas, set_isa
from tests.support.cpu_kernels import packing_isas

packing_isas()  # skipped without any

KINDS = {"weight": Olmo2RMSNorm, "plus one": Gemma3RMSNorm}


@pytest.fixture(params=["avx2", "best"])
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    before = current_isa()
    set_isa(machine_isas()[-1] if request.param == "best" else request.param)
    yield
    set_isa(before)


def make_norm(kind: str, width: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(width)
    norm = KINDS[kind](width, eps=1e-3)
    torch.nn.init.normal_(norm.weight, std=0.5)
    return norm.to(dtype).requires_grad_(False)


def replaced(norm: Any, **options: Any) -> Any:
    return CpuReplacements().norm(norm, EngineConfig("m", **options))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 1, 16), (3, 5, 2, 48), (200, 1024)])  # the last one on several threads
def test_it_is_rounded_once(kind: str, shape: tuple[int, ...]) -> None:
    norm = make_norm(kind, shape[-1])
    x = (3 * torch.randn(shape)).bfloat16()
    got = replaced(norm)(x)
    wide, weight = x.double(), norm.weight.double() + (1.0 if kind == "plus one" else 0.0)
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    assert (got.shape, got.dtype) == (x.shape, torch.bfloat16)
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-6)
    assert (got.double() - want).norm() <= 2**-8 * want.norm()


def test_parts_of_rows_are_rows() -> None:
    norm = replaced(make_norm("weight", 32))
    wide = torch.randn(7, 96).bfloat16()
    part = wide[:, 32:64]
    assert torch.equal(norm(part), norm(part.contiguous()))
    turned = torch.randn(32, 7).bfloat16().t()
    assert torch.equal(norm(turned), norm(turned.contiguous()))


def test_a_number_that_is_none_stays_in_its_row() -> None:
    x = torch.ones(3, 32).bfloat16()
    x[1, 5] = torch.nan
    assert replaced(make_norm("weight", 32))(x).isnan().any(1).tolist() == [False, True, False]


def test_what_cannot_be_fused_is_left_alone() -> None:
    assert isinstance(replaced(make_norm("weight", 32)), CpuNorm)
    assert replaced(make_norm("weight", 24)) is None
    assert replaced(make_norm("weight", 32, torch.float32)) is None
    assert replaced(make_norm("weight", 32), linear="torch") is None
    assert replaced(torch.nn.Identity()) is None
