"""What FlashInfer cannot do is said by name when a model is loaded, not when its first batch is planned."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.backends.flashinfer_limits import MOST_WORK, check_heads, check_latent_step, check_latents
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
        (heads(96), False, "head_dim 64, 128, 256, 512, not 96"),
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


def plan_of_latents(q_lens: list[int], kv_lens: list[int], heads: int, processors: int) -> int:
    """The pieces of work of a plan, counted as FlashInfer does (MLAPlan in its scheduler.cuh)."""
    tiles_of = 2 if sum(q_lens) * heads // len(q_lens) > 64 else 1
    clusters, rows = processors // tiles_of, 64 * tiles_of
    seen: list[int] = []
    for q, kv in zip(q_lens, kv_lens, strict=True):
        tiles = -(-q * heads // rows)
        seen += [max(min(kv - q + -(-(i + 1) * rows // heads), kv), 0) for i in range(tiles - 1)] + [kv]
    mean = max(-(-sum(seen) // clusters), 1)
    small = next((limit for most, limit in ((8, 32), (16, 64), (32, 128), (64, 192)) if mean <= most), None)
    limit = small or -(-mean // 256) * 256
    return sum(max(1, -(-kv // limit)) for kv in seen)


def passes(heads: int, tokens: int, sequences: int) -> bool:
    try:
        check_latent_step(torch.device("cuda"), heads, tokens, sequences)
    except BackendUnavailable:
        return False
    return True


@pytest.mark.parametrize("heads", [1, 2, 16, 64, 128])
def test_no_step_that_passes_needs_a_larger_plan(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks beside decode rows, at the border of what passes."""
    monkeypatch.setattr("engine.backends.flashinfer_limits.MOST_WORK", 600)
    processors = 132

    class Properties:
        multi_processor_count = processors

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    rng = np.random.default_rng(heads)
    largest, step = 0, max(1, 64 // heads)
    for _ in range(400):
        sequences = int(rng.choice([1, 3, 40, 230]))
        tokens = sequences
        while passes(heads, tokens + step, sequences):
            tokens += step
        shares = rng.multinomial(tokens - sequences, rng.dirichlet(np.full(sequences, rng.choice([0.02, 1]))))
        q_lens = [1 + int(share) for share in shares]
        before = [int(rng.choice([0, 10, 5000])) for _ in q_lens]
        kv_lens = [q + more for q, more in zip(q_lens, before, strict=True)]
        largest = max(largest, plan_of_latents(q_lens, kv_lens, heads, processors))
    assert 400 < largest <= 600


def test_the_largest_step_over_latents() -> None:
    """With DeepSeek-V3's heads a tile is a token."""
    check_latent_step(torch.device("cpu"), 128, MOST_WORK, 1)
    check_latent_step(torch.device("cpu"), 16, 8 * MOST_WORK, 1)
    with pytest.raises(BackendUnavailable, match=r"plans 16384 pieces .* may have 16385"):
        check_latent_step(torch.device("cpu"), 128, MOST_WORK + 1, 1)
