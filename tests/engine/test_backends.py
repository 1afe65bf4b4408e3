"""Which backend runs; FlashInfer's index arrays, read by a stand-in as its manual says."""

from __future__ import annotations

import logging
import sys
import types
from typing import Any

import pytest
import torch

from engine.attention import PagedLayers
from engine.backends.choose import build_attention
from engine.backends.flashinfer import FlashInferAttention
from engine.backends.torch_twin import TorchAttention
from engine.config import EngineConfig
from kvcache.layout import KVGroupSpec
from kvcache.pool import MHAKVCache
from tests.engine.conftest import PROMPTS, Drawn
from tests.support.driver import Driver, open_runner
from wire.errors import ConfigError


class StandInWrapper:
    """FlashInfer's paged prefill wrapper by its documentation, one query and one head at a time."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str) -> None:
        assert workspace.dtype == torch.uint8
        assert kv_layout == "HND"

    def plan(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int,
        page_size: int, *, causal: bool, sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        indices = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(index.dtype == torch.int32 for index in indices)
        assert causal
        self.q_starts, self.kv_starts, self.pages, self.last = (index.tolist() for index in indices)
        self.group = num_qo_heads // num_kv_heads
        self.page_size, self.scale = page_size, sm_scale

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        for i, last in enumerate(self.last):
            pages = self.pages[self.kv_starts[i] : self.kv_starts[i + 1]]
            length = (len(pages) - 1) * self.page_size + last
            k, v = (side[pages].transpose(1, 2).flatten(0, 1)[:length] for side in kv)  # [length, heads, D]
            k, v = (side.repeat_interleave(self.group, dim=1) for side in (k, v))
            start, end = self.q_starts[i], self.q_starts[i + 1]
            scores = torch.einsum("qhd,khd->hqk", q[start:end], k) * self.scale
            hidden = torch.ones(end - start, length, dtype=torch.bool).triu(length - (end - start) + 1)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out[start:end] = torch.einsum("hqk,khd->qhd", weights, v)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = StandInWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)


@pytest.mark.usefixtures("stand_in")
def test_flashinfer_is_planned_so_that_tokens_equal_generate(drawn: Drawn) -> None:
    path, expected = drawn("qwen3")
    runner, pool = open_runner(path, 16, 40)
    backend = FlashInferAttention(pool, query_heads=4, scale=32**-0.5)
    runner.attention = PagedLayers(backend, None, runner.spec.groups)
    driver = Driver(runner, 40, 16)
    lanes = [driver.add(prompt) for prompt in PROMPTS]
    driver.generate(lanes, 24, chunk=7, stagger=3)
    assert [lane.outputs for lane in lanes] == [answer[:24] for answer in expected]


def pool_of(head_dim: int = 16, dtype: torch.dtype = torch.float32) -> MHAKVCache:
    return MHAKVCache(KVGroupSpec(layer_ids=(0,), kv_heads=2, head_dim=head_dim, dtype=dtype), 4, 16)


def test_auto_falls_back_to_torch_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        backend = build_attention(EngineConfig("m"), pool_of(head_dim=12), 4, 1.0)
    assert isinstance(backend, TorchAttention)
    assert "cpu cannot run" in caplog.text


@pytest.mark.parametrize(
    ("attention", "head_dim", "problem"),
    [("cpu", 12, "cannot run"), ("flashinfer", 16, "does not run on device cpu")],
)
def test_a_backend_that_was_named_runs_or_is_refused(attention: str, head_dim: int, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        build_attention(EngineConfig("m", attention=attention), pool_of(head_dim), 4, 1.0)
    assert refused.value.key == "engine.attention"


def test_on_cuda_float32_takes_torch_and_a_named_flashinfer_is_refused() -> None:
    config = EngineConfig("m", device="cuda", attention="auto")
    assert isinstance(build_attention(config, pool_of(), 4, 1.0), TorchAttention)
    with pytest.raises(ConfigError, match="float16 and bfloat16"):
        build_attention(EngineConfig("m", device="cuda", attention="flashinfer"), pool_of(), 4, 1.0)
