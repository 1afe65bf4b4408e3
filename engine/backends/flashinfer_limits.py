"""What FlashInfer's kernels cannot do, found at load and said by name.

From its sources: `fa2` of 0.7 is compiled for these head dimensions, and its wrappers raise for the rest only
when a batch is planned.
"""

from __future__ import annotations

import torch

from engine.backends.pick import BackendUnavailable
from engine.cuda import triton_kernels
from engine.cuda.limits import DTYPES, HEAD_DIMS
from engine.token_choice import TokenChoice
from kvcache.pool import MHAKVCache, MLAKVCache
from kvcache.quant import KVFormat

LATENT_WIDTHS = (512, 64)
"""The kv_lora_rank and rope_dim for which FlashInfer has kernels. Every published DeepSeek model has them."""

QUERY_TILE = 128
"""Rows of a tile of latent attention, each of one query and one head. Small batches have tiles of half."""

MOST_WORK = 16384
"""Pieces of work in one plan of latent attention: tiles, some of them split by the keys."""

LOWEST = {torch.float16: (7, 5), torch.bfloat16: (8, 0)}
"""The compute capability from which `fa2` attends in a dtype. Latents need 8.0 in both."""


def check_heads(pool: MHAKVCache, sinks: bool) -> None:
    """Raises BackendUnavailable if FlashInfer cannot attend to this pool."""
    spec = pool.spec
    _check_dtype(spec.dtype)
    if spec.stored is KVFormat.FP4_E2M1 or (sinks and spec.stored is not KVFormat.AUTO):
        raise BackendUnavailable(
            f"FlashInfer does not read {spec.stored} pages{' with sinks' if sinks else ''}"
        )
    if spec.head_dim not in HEAD_DIMS:
        some = ", ".join(map(str, HEAD_DIMS))
        raise BackendUnavailable(f"FlashInfer attends with head_dim {some}, not {spec.head_dim}")
    _check_capability(pool.device, spec.dtype, LOWEST[spec.dtype])


def check_latents(pool: MLAKVCache, heads: int) -> None:
    """The same for a pool of latents."""
    spec = pool.spec
    _check_dtype(spec.dtype)
    if spec.stored is not KVFormat.AUTO:
        raise BackendUnavailable(f"FlashInfer does not read {spec.stored} latents")
    if (widths := (spec.kv_lora_rank, spec.rope_dim)) != LATENT_WIDTHS:
        rank, rope = LATENT_WIDTHS
        raise BackendUnavailable(f"FlashInfer attends to latents of {rank} + {rope} values, not {widths}")
    if QUERY_TILE % heads:
        # A tile ends between two heads of a query. It refuses batches where a tile of keys begins there, too.
        raise BackendUnavailable(
            f"FlashInfer attends to latents with heads that divide {QUERY_TILE}, not {heads}"
        )
    _check_capability(pool.device, spec.dtype, (8, 0))


def check_index(pool: MLAKVCache, choice: TokenChoice) -> None:
    """Raises BackendUnavailable if our kernel cannot score this pool's index keys."""
    if not triton_kernels.available():
        raise BackendUnavailable("sparse attention needs Triton, which is not installed")
    if (dim := pool.spec.index_dim) < 16 or dim & (dim - 1):
        raise BackendUnavailable(f"index keys of a power of two values from 16 on are scored, not of {dim}")
    if pool.page_size % choice.kpool:
        raise BackendUnavailable(f"pages of {pool.page_size} have no whole k-pools of {choice.kpool} tokens")


def check_latent_step(device: torch.device, heads: int, tokens: int, sequences: int) -> None:
    """Raises BackendUnavailable if FlashInfer may not plan a step of so many new tokens and sequences.

    Sequences with half a tile each, or less, have at most two small tiles on average; others have tiles of
    QUERY_TILE, the last one of each sequence maybe with one row. Splits add at most a piece for each
    multiprocessor (MLAPlan in its scheduler.cuh).
    """
    per_tile = QUERY_TILE // heads
    tiles = max((tokens + sequences * (per_tile - 1)) // per_tile, 2 * sequences)
    splits = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
    if tiles + splits > MOST_WORK:
        raise BackendUnavailable(
            f"FlashInfer plans {MOST_WORK} pieces of work at once for latents; with {heads} heads this step "
            f"may have {tiles + splits}"
        )


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise BackendUnavailable(f"FlashInfer attends in float16 and bfloat16, not {dtype}")


def _check_capability(device: torch.device, dtype: torch.dtype, lowest: tuple[int, int]) -> None:
    if device.type != "cuda":
        return
    has = torch.cuda.get_device_capability(device)
    if has < lowest:
        needs, said = (".".join(map(str, pair)) for pair in (lowest, has))
        raise BackendUnavailable(f"FlashInfer attends in {dtype} from compute capability {needs}, not {said}")
