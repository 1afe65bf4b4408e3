"""What FlashInfer cannot do is said by name when a model is loaded, not when its first batch is planned."""

from __future__ import annotations

import pytest
import torch

from engine.backends.flashinfer_limits import check_heads, check_latents
from engine.backends.pick import BackendUnavailable
from kvcache.layout import KVGroupSpec, LatentGroupSpec
from kvcache.pool import MHAKVCache, MLAKVCache
from kvcache.quant import KVFormat


def heads(
    head_dim: int = 64, dtype: torch.dtype = torch.bfloat16, stored: KVFormat = KVFormat.AUTO
) -> MHAKVCache:
    return MHAKVCache(KVGroupSpec((0,), 2, head_dim, dtype, stored=stored), 2, 16)


def latents(
    rank: int = 512, dtype: torch.dtype = torch.bfloat16, stored: KVFormat = KVFormat.AUTO
) -> MLAKVCache:
    return MLAKVCache(LatentGroupSpec((0,), rank, 64, dtype, stored=stored), 2, 16)


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)


def test_what_it_can_do_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch, (8, 0))
    for pool in (heads(), heads(128, torch.float16), heads(256, stored=KVFormat.FP8_E4M3)):
        pool.device = torch.device("cuda:0")
        check_heads(pool, sinks=pool.spec.stored is KVFormat.AUTO)
    for count in (1, 16, 64, 128):
        check_latents(latents(), count)


@pytest.mark.parametrize(
    ("pool", "sinks", "problem"),
    [
        (heads(dtype=torch.float32), False, "float16 and bfloat16, not torch.float32"),
        (heads(96), False, "head_dim 64, 128, 256, not 96"),
        (heads(stored=KVFormat.FP8_E4M3), True, "fp8_e4m3 pages with sinks"),
        (heads(stored=KVFormat.FP4_E2M1), False, "fp4_e2m1 pages"),
    ],
)
def test_heads_that_it_cannot_attend_with(pool: MHAKVCache, sinks: bool, problem: str) -> None:
    with pytest.raises(BackendUnavailable, match=problem):
        check_heads(pool, sinks)


@pytest.mark.parametrize(
    ("pool", "count", "problem"),
    [
        (latents(dtype=torch.float32), 16, "not torch.float32"),
        (latents(256), 16, "latents of 512"),
        (latents(stored=KVFormat.FP8_E5M2), 16, "fp8_e5m2 latents"),
        *((latents(), count, f"heads that divide 128, not {count}") for count in (20, 24, 40, 96, 256)),
    ],
)
def test_latents_that_it_cannot_attend_to(pool: MLAKVCache, count: int, problem: str) -> None:
    with pytest.raises(BackendUnavailable, match=problem):
        check_latents(pool, count)


@pytest.mark.parametrize(
    ("capability", "dtype", "runs"),
    [((7, 5), torch.bfloat16, False), ((7, 5), torch.float16, True), ((7, 0), torch.float16, False)],
)
def test_a_gpu_that_is_too_old(
    capability: tuple[int, int], dtype: torch.dtype, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu(monkeypatch, capability)
    pool = heads(dtype=dtype)
    pool.device = torch.device("cuda:0")
    if runs:
        check_heads(pool, sinks=False)
        return
    with pytest.raises(BackendUnavailable, match="compute capability"):
        check_heads(pool, sinks=False)
