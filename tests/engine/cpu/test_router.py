"""Routers whose weight is packed."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from engine.cpu.router import pack_router
from tests.support.cpu_kernels import packing_isas

packing_isas()  # skipped without any
HIDDEN = 96


def routers(experts: int) -> list[torch.nn.Module]:
    """One without a bias and one with, seeded."""
    torch.manual_seed(1)
    made = [
        Qwen3MoeTopKRouter(Qwen3MoeConfig(hidden_size=HIDDEN, num_experts=experts, num_experts_per_tok=2)),
        GptOssTopKRouter(GptOssConfig(hidden_size=HIDDEN, num_local_experts=experts, num_experts_per_tok=2)),
    ]
    for router in made:
        for parameter in router.parameters():
            torch.nn.init.normal_(parameter)
    return [router.bfloat16() for router in made]


@pytest.mark.parametrize("experts", [4, 16, 40])
@pytest.mark.parametrize("tokens", [1, 9, 70])
def test_it_returns_what_the_router_does(experts: int, tokens: int) -> None:
    x = torch.randn(tokens, HIDDEN).bfloat16()
    for router in routers(experts):
        packed = copy.deepcopy(router)
        pack_router(packed)
        with torch.inference_mode():
            exact = copy.deepcopy(router).float()(x.float())[0]
            logits, scores, chosen = packed(x)
        assert logits.dtype == torch.bfloat16
        assert torch.allclose(logits.float(), exact, rtol=2**-8, atol=1e-3)
        best = exact.gather(1, chosen)  # the same experts, or such that rounding made equal
        assert torch.allclose(best, exact.topk(2).values, rtol=2**-7, atol=1e-2)
        assert scores.shape == chosen.shape == (tokens, 2)


def test_its_weight_is_held_once() -> None:
    router = routers(16)[0]
    pack_router(router)
    assert not list(router.parameters())
    assert router.weight.shape == (16, HIDDEN)
    assert router.weight.device.type == "meta", "the shape alone"
