"""What every scheduler does with memory: slots for new tokens, evicting first when they are short.

All functions give all or nothing: None means that nothing was taken, no field changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvcache.allocator import Slots
from kvcache.memory import Memory
from kvcache.pool import ReqToTokenPool
from kvcache.request import NO_SLOTS, CachedRequest


def evict_for_pages(memory: Memory, pages: int) -> None:
    """Evict until `pages` pages are free, or nothing more can be evicted."""
    short = pages * memory.page_size - memory.allocator.available_size()
    if short > 0:
        memory.cache.evict(short)


def alloc_token_slots(memory: Memory, num_tokens: int) -> Slots | None:
    """`num_tokens` slots (whole pages)."""
    evict_for_pages(memory, num_tokens // memory.page_size)
    return memory.allocator.alloc(num_tokens)


def alloc_for_extend(
    memory: Memory, reqs: Sequence[CachedRequest], extend_lens: Sequence[int]
) -> Slots | None:
    """Slots for the next `extend_lens[i]` tokens of each request, concatenated, and written to its row.

    A request without a row gets one, with its `prefix_indices` in it; the prefix must be locked.
    """
    pool = memory.req_to_token_pool
    fresh = [req for req in reqs if req.req_pool_idx is None]
    if len(fresh) > pool.available_size():
        return None
    size = memory.page_size
    prefix_lens = np.array(
        [len(r.prefix_indices) if r.req_pool_idx is None else r.kv_allocated_len for r in reqs], np.int64
    )
    new_lens = np.array(extend_lens, np.int64)
    seq_lens = prefix_lens + new_lens
    last_loc = np.array([_last_slot(pool, req) for req in reqs], np.int64)
    evict_for_pages(memory, int((-(-seq_lens // size) + prefix_lens // -size).sum()))
    slots = memory.allocator.alloc_extend(prefix_lens, seq_lens, last_loc, int(new_lens.sum()))
    if slots is None:
        return None
    rows = pool.alloc(len(fresh))
    assert rows is not None, "free rows were counted, yet cannot be had"
    for req, row in zip(fresh, rows, strict=True):
        req.req_pool_idx = row
        pool.write(row, 0, req.prefix_indices)
    write_cache_indices(pool, [_row(req) for req in reqs], prefix_lens, new_lens, slots)
    for req, length in zip(reqs, seq_lens.tolist(), strict=True):
        req.kv_allocated_len = length
    return slots


def alloc_for_decode(memory: Memory, reqs: Sequence[CachedRequest]) -> Slots | None:
    """One slot for the next token of each request, written to its row."""
    pool = memory.req_to_token_pool
    rows = np.array([_row(req) for req in reqs], np.int64)
    lens = np.array([req.kv_allocated_len for req in reqs], np.int64)
    evict_for_pages(memory, int(np.count_nonzero(lens % memory.page_size == 0)))
    slots = memory.allocator.alloc_decode(lens + 1, pool.req_to_token[rows, lens - 1])
    if slots is None:
        return None
    pool.req_to_token[rows, lens] = slots
    for req in reqs:
        req.kv_allocated_len += 1
    return slots


def write_cache_indices(
    pool: ReqToTokenPool,
    rows: Sequence[int],
    starts: npt.NDArray[np.int64],
    lens: npt.NDArray[np.int64],
    slots: Slots,
) -> None:
    """Scatter concatenated `slots` to positions `[starts[i], starts[i] + lens[i])` of each row."""
    first = np.cumsum(lens) - lens
    positions = np.arange(len(slots)) + np.repeat(starts - first, lens)
    pool.req_to_token[np.repeat(rows, lens), positions] = slots


def release_kv_cache(memory: Memory, req: CachedRequest, is_insert: bool = True) -> None:
    """End a request's hold on memory: pages into the tree or free, lock and row given back, lengths 0."""
    row = _row(req)
    memory.cache.cache_finished_req(req, is_insert=is_insert)
    memory.req_to_token_pool.free(row)
    req.req_pool_idx = None
    req.prefix_indices = NO_SLOTS
    req.kv_committed_len = req.kv_allocated_len = 0


def _row(req: CachedRequest) -> int:
    assert req.req_pool_idx is not None, "the request has no row"
    return req.req_pool_idx


def _last_slot(pool: ReqToTokenPool, req: CachedRequest) -> int:
    """Slot of the last token that has one, -1 when there is none."""
    if req.req_pool_idx is None:
        return int(req.prefix_indices[-1]) if len(req.prefix_indices) else -1
    return int(pool.req_to_token[req.req_pool_idx, req.kv_allocated_len - 1]) if req.kv_allocated_len else -1
