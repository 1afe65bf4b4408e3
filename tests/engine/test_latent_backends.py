"""Which latent backend runs."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from common.errors import ConfigError
from engine.attention_layers import AttentionLayer
from engine.backends.latent_choose import build_latent
from engine.backends.latent_reference import TorchLatentAttention
from engine.backends.sparse_cpu import CpuSparseAttention
from engine.backends.sparse_flashinfer import FlashInferSparseAttention
from engine.backends.sparse_reference import TorchSparseAttention
from engine.config import EngineConfig
from engine.cuda import triton_kernels
from engine.token_choice import TokenChoice
from kvcache.layout import LatentGroupSpec
from kvcache.pool import MLAKVCache
from kvcache.quant import KVFormat
from tests.support.flashinfer_stand_in import flashinfer_module

LAYER = [AttentionLayer(layer=0, query_heads=4, scale=1.0, window=None)]


def pool_of(
    rank: int,
    dtype: torch.dtype = torch.float32,
    stored: KVFormat = KVFormat.AUTO,
    index_dim: int = 0,
) -> MLAKVCache:
    return MLAKVCache(LatentGroupSpec((0,), rank, 64, dtype, stored=stored, index_dim=index_dim), 2, 16)


def test_auto_falls_back_to_torch_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(build_latent(EngineConfig("m"), pool_of(576), LAYER), TorchLatentAttention)
    assert "up to 512 values" in caplog.text
    on_cuda = EngineConfig("m", device="cuda")
    assert isinstance(build_latent(on_cuda, pool_of(256, torch.bfloat16), LAYER), TorchLatentAttention)
    assert "latents of 512 + 64 values, not (256, 64)" in caplog.text
    quantised = pool_of(512, torch.bfloat16, KVFormat.FP8_E4M3)
    assert isinstance(build_latent(on_cuda, quantised, LAYER), TorchLatentAttention)
    assert "does not read fp8_e4m3 latents" in caplog.text
    forty = [replace(LAYER[0], query_heads=40)]
    assert isinstance(build_latent(on_cuda, pool_of(512, torch.bfloat16), forty), TorchLatentAttention)
    assert "heads that divide 128, not 40" in caplog.text


def test_sparse_attention_has_backends_of_its_own(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, mla = flashinfer_module()
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", mla)
    layer, on_cuda = [replace(LAYER[0], choice=TokenChoice(8))], EngineConfig("m", device="cuda")
    pool = pool_of(512, torch.bfloat16, index_dim=128)
    assert isinstance(build_latent(EngineConfig("m"), pool, layer), CpuSparseAttention)
    fp4 = pool_of(512, torch.bfloat16, KVFormat.FP4_E2M1, index_dim=128)
    assert not isinstance(build_latent(EngineConfig("m"), fp4, layer), CpuSparseAttention)
    assert "share their scales' place in a page" in caplog.text
    monkeypatch.setattr(triton_kernels, "available", lambda: False)
    assert isinstance(build_latent(on_cuda, pool, layer), TorchSparseAttention)
    assert "needs Triton" in caplog.text
    monkeypatch.setattr(triton_kernels, "available", lambda: True)
    assert isinstance(build_latent(on_cuda, pool, layer), FlashInferSparseAttention)
    odd = pool_of(512, torch.bfloat16, index_dim=96)
    assert isinstance(build_latent(on_cuda, odd, layer), TorchSparseAttention)
    assert "a power of two values from 16 on are scored, not of 96" in caplog.text


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
    assert refused.value.key == "attention_backend"
