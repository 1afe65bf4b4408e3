"""Which backend runs; FlashInfer's index arrays, read by a stand-in as its manual says."""

from __future__ import annotations

import logging
import sys
import types
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from engine.backends.choose import build_attention
from engine.backends.flashinfer import FlashInferAttention
from engine.backends.torch_reference import TorchAttention
from engine.config import EngineConfig
from engine.paged_layers import PagedLayers
from kvcache.layout import KVGroupSpec
from kvcache.pool import MHAKVCache
from tests.engine.conftest import PROMPTS, Drawn
from tests.support.driver import Driver, open_pools


class StandInWrapper:
    """FlashInfer's paged prefill wrapper by its documentation, one query and one head at a time."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str) -> None:
        assert workspace.dtype == torch.uint8
        assert kv_layout == "HND"

    def plan(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int,
        page_size: int, *, causal: bool, window_left: int, sm_scale: float, q_data_type: torch.dtype,
        kv_data_type: torch.dtype, logits_soft_cap: float | None = None,
    ) -> None:  # fmt: skip
        indices = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(index.dtype == torch.int32 for index in indices)
        assert causal
        self.q_starts, self.kv_starts, self.pages, self.last = (index.tolist() for index in indices)
        self.group = num_qo_heads // num_kv_heads
        self.page_size, self.scale, self.window_left = page_size, sm_scale, window_left
        self.cap = logits_soft_cap or torch.inf

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        self.attend(q, kv, out, torch.full((q.shape[1],), -torch.inf))

    def attend(
        self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor, sinks: torch.Tensor
    ) -> None:
        for i, last in enumerate(self.last):
            pages = self.pages[self.kv_starts[i] : self.kv_starts[i + 1]]
            length = (len(pages) - 1) * self.page_size + last
            k, v = (side[pages].transpose(1, 2).flatten(0, 1)[:length] for side in kv)  # [length, heads, D]
            k, v = (side.repeat_interleave(self.group, dim=1) for side in (k, v))
            start, end = self.q_starts[i], self.q_starts[i + 1]
            scores = torch.einsum("qhd,khd->hqk", q[start:end], k) * self.scale
            if self.cap < torch.inf:
                scores = self.cap * torch.tanh(scores / self.cap)
            places = torch.arange(length)
            behind = places[length - (end - start) :, None] - places  # of a query, a key
            hidden = (behind < 0) | ((behind > self.window_left) & (self.window_left >= 0))
            scores = scores.masked_fill(hidden, -torch.inf)
            column = sinks[:, None, None].expand(-1, end - start, 1)
            weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
            out[start:end] = torch.einsum("hqk,khd->qhd", weights, v)


class StandInSinkWrapper(StandInWrapper):
    """Its variant for attention sinks, which is told at once what it will be planned for."""

    def __init__(
        self, workspace: torch.Tensor, kv_layout: str, q_data_type: torch.dtype, kv_data_type: torch.dtype,
        head_dim_qk: int, head_dim_vo: int, window_left: int,
    ) -> None:  # fmt: skip
        super().__init__(workspace, kv_layout)
        assert head_dim_qk == head_dim_vo
        self.promised = (head_dim_qk, window_left, q_data_type, kv_data_type)

    def plan(self, *indices_and_sizes: Any, **options: Any) -> None:
        head_dim, names = indices_and_sizes[6], ("window_left", "q_data_type", "kv_data_type")
        assert self.promised == (head_dim, *(options[name] for name in names))
        super().plan(*indices_and_sizes, **options)

    def run(  # type: ignore[override]
        self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], sink: torch.Tensor, sm_scale: float,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        assert sink.dtype == torch.float32
        assert sm_scale == self.scale
        self.attend(q, kv, out, sink)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = types.ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = StandInWrapper
    module.BatchAttentionWithAttentionSinkWrapper = StandInSinkWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return module


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("family", ["qwen3", "mistral_window", "gemma2", "gpt_oss"])
def test_flashinfer_is_planned_so_that_tokens_equal_generate(family: str, drawn: Drawn) -> None:
    path, expected = drawn(family)
    runner, pools = open_pools(path, 16, 40)
    softcap, width = (4.0, 24) if family == "gemma2" else (None, None)
    backends = {
        pool.spec.kind: FlashInferAttention(
            pool, 4, (width or pool.spec.head_dim) ** -0.5, sinks=family == "gpt_oss", softcap=softcap
        )
        for pool in pools.values()
        if pool.spec.layer_ids
    }
    runner.attention = PagedLayers(backends.get("full"), backends.get("window"), runner.spec.groups)
    driver = Driver(runner, 40, 16, window_pool=pools.get("window"))
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


def test_a_flashinfer_without_sinks_is_refused_by_name(
    stand_in: Any, caplog: pytest.LogCaptureFixture
) -> None:
    del stand_in.BatchAttentionWithAttentionSinkWrapper
    pool = pool_of(dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        backend = build_attention(EngineConfig("m", device="cuda"), pool, 4, 1.0, sinks=True)
    assert isinstance(backend, TorchAttention)
    assert "has no attention sinks" in caplog.text
    with pytest.raises(ConfigError, match="has no attention sinks"):
        build_attention(EngineConfig("m", device="cuda", attention="flashinfer"), pool, 4, 1.0, sinks=True)


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
