"""What kernels of attention cannot do for block-sparse attention, found at load and said by name."""

from __future__ import annotations

from engine.backends.pick import BackendUnavailable
from engine.block_choice import BlockChoice
from engine.cuda import triton_kernels
from kvcache.indexed_pool import IndexedKVCache


def check_blocks(pool: IndexedKVCache, choice: BlockChoice) -> None:
    """Raises BackendUnavailable if blocks of this pool are not pages of one head each, or if the host does
    not know how many tokens a query sees."""
    if choice.heads != pool.spec.kv_heads:
        raise BackendUnavailable(f"{choice.heads} index heads choose for {pool.spec.kv_heads} KV heads")
    if choice.local == 0:
        raise BackendUnavailable("a query may not see its own block")
    if choice.tokens % pool.page_size:
        raise BackendUnavailable(f"blocks of {choice.tokens} tokens have no whole pages of {pool.page_size}")
    if not pool.has_whole_tiles():
        dims = pool.spec.head_dim, pool.index.shape[-1]
        raise BackendUnavailable("heads of {} values and index keys of {} are not aligned".format(*dims))


def check_block_scores(pool: IndexedKVCache) -> None:
    """Raises BackendUnavailable if our kernel cannot score this pool's index keys."""
    if not triton_kernels.available():
        raise BackendUnavailable("block-sparse attention needs Triton, which is not installed")
    if (dim := pool.index.shape[-1]) < 16 or dim & (dim - 1):
        raise BackendUnavailable(f"index keys of a power of two values from 16 on are scored, not of {dim}")
