"""Which latent backend runs; FlashInfer's index arrays, read by a stand-in as its manual says."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from engine.backends.latent_choose import build_latent
from engine.backends.latent_flashinfer import FlashInferLatentAttention
from engine.backends.latent_reference import TorchLatentAttention
from engine.config import EngineConfig
from engine.loader import AttentionLayer, load_model
from engine.paged_layers import PagedLayers
from kvcache.layout import LatentGroupSpec
from kvcache.pool import MLAKVCache
from kvcache.quant import KVFormat
from tests.engine.conftest import PROMPTS, Drawn
from tests.support.driver import Driver, open_runner


class StandInWrapper:
    """FlashInfer's MLA wrapper by its documentation, one query and one head at a time."""

    def __init__(self, workspace: torch.Tensor) -> None:
        assert workspace.dtype == torch.uint8

    def plan(
        self, *, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor, num_heads: int, head_dim_ckv: int, head_dim_kpe: int, page_size: int,
        causal: bool, sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        indices = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        assert all(index.dtype == torch.int32 for index in indices)
        assert causal
        self.q_starts, self.kv_starts, self.pages, self.lengths = (index.tolist() for index in indices)
        self.q_shape, self.scale = (num_heads, head_dim_ckv), sm_scale
        self.cache_shapes = ((page_size, head_dim_ckv), (page_size, head_dim_kpe))

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv: torch.Tensor,
        kpe: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        assert q_nope.shape[1:] == self.q_shape
        assert q_nope.is_contiguous()
        assert q_pe.is_contiguous()
        assert (ckv.shape[1:], kpe.shape[1:]) == self.cache_shapes
        for i, length in enumerate(self.lengths):
            pages = self.pages[self.kv_starts[i] : self.kv_starts[i + 1]]
            latents, ropes = (side[pages].flatten(0, 1)[:length] for side in (ckv, kpe))
            start, end = self.q_starts[i], self.q_starts[i + 1]
            for token in range(start, end):
                seen = length - end + token + 1
                scores = q_nope[token] @ latents[:seen].T + q_pe[token] @ ropes[:seen].T
                out[token] = (scores * self.scale).softmax(-1) @ latents[:seen]


def test_flashinfer_is_planned_so_that_tokens_equal_generate(
    drawn: Drawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    package: Any = types.ModuleType("flashinfer")
    package.mla = types.ModuleType("flashinfer.mla")
    package.mla.BatchMLAPagedAttentionWrapper = StandInWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", package.mla)
    path, expected = drawn("deepseek_v3")
    runner, pool = open_runner(path, 16, 40)
    scale = load_model(EngineConfig(str(path))).attention[0].scale
    backend = FlashInferLatentAttention(pool, 4, scale)
    runner.attention = PagedLayers(None, None, runner.spec.groups, backend)
    driver = Driver(runner, 40, 16)
    lanes = [driver.add(prompt) for prompt in PROMPTS]
    driver.generate(lanes, 24, chunk=7, stagger=3)
    assert [lane.outputs for lane in lanes] == [answer[:24] for answer in expected]


LAYER = [AttentionLayer(layer=0, query_heads=4, scale=1.0, window=None)]


def pool_of(rank: int, dtype: torch.dtype = torch.float32, stored: KVFormat = KVFormat.AUTO) -> MLAKVCache:
    return MLAKVCache(LatentGroupSpec((0,), rank, 64, dtype, stored=stored), 2, 16)


def test_auto_falls_back_to_torch_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(build_latent(EngineConfig("m"), pool_of(576), LAYER), TorchLatentAttention)
    assert "up to 512 values" in caplog.text
    on_cuda = EngineConfig("m", device="cuda")
    assert isinstance(build_latent(on_cuda, pool_of(256, torch.bfloat16), LAYER), TorchLatentAttention)
    assert "latents of 512 + 64 values, not (256, 64)" in caplog.text
    quantised = pool_of(512, torch.bfloat16, KVFormat.FP8_E4M3)
    assert isinstance(build_latent(on_cuda, quantised, LAYER), TorchLatentAttention)
    assert "does not read fp8_e4m3 latents" in caplog.text


@pytest.mark.parametrize(
    ("attention", "device", "problem"),
    [
        ("cpu", "cpu", "up to 512 values"),
        ("flashinfer", "cpu", "does not run on device cpu"),
        ("cpu", "cuda", "does not run on device cuda"),
        ("flashinfer", "cuda", "float16 and bfloat16"),
    ],
)
def test_a_backend_that_was_named_runs_or_is_refused(attention: str, device: str, problem: str) -> None:
    config = EngineConfig("m", attention=attention, device=device)
    with pytest.raises(ConfigError, match=problem) as refused:
        build_latent(config, pool_of(576), LAYER)
    assert refused.value.key == "engine.attention"
