"""What every scheduler does with memory: slots for new tokens, evicting first when they are short.

Pages are allocated whole, and a row names every slot of its pages, used or not: a decode step inside a page
allocates and writes nothing. All functions give all or nothing: when there are too few pages, no page is
allocated and no row or field has changed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcache.allocator import NO_SLOTS, Pages, Slots
from kvcache.memory import Memory
from kvcache.pool import ReqToTokenPool
from kvcache.request import CachedRequest


def alloc_token_slots(memory: Memory, num_tokens: int) -> Slots | None:
    """`num_tokens` slots (whole pages) of the primary group."""
    memory.primary.make_room(num_tokens // memory.page_size)
    return memory.allocator.alloc(num_tokens)


def alloc_for_extend(memory: Memory, req: CachedRequest, num_tokens: int) -> bool:
    """Slots for the first `num_tokens` tokens of a request that has a row.

    The tokens of its `prefix_indices` (whole pages, locked) have slots already. The row then names all of
    them. False when there are too few pages.
    """
    prefix = req.prefix_indices
    pages = -(-(num_tokens - len(prefix)) // memory.page_size)
    slots = alloc_token_slots(memory, pages * memory.page_size)
    if slots is None:
        return False
    write_cache_indices(memory.req_to_token_pool, _row(req), prefix, slots)
    req.kv_allocated_len = len(prefix) + len(slots)
    return True


def write_cache_indices(pool: ReqToTokenPool, row: int, prefix: Slots, slots: Slots) -> None:
    """Let a row name the slots of a sequence: `prefix`, then `slots`."""
    pool.write(row, 0, prefix)
    pool.write(row, len(prefix), slots)


def alloc_for_decode(
    memory: Memory, rows: npt.NDArray[np.integer], lens: npt.NDArray[np.integer]
) -> Pages | None:
    """The next page of each of some distinct rows, whose sequences of `lens[i]` tokens fill their pages.

    The rows then name all its slots. Returns the page ids; None when there are too few pages.
    """
    pages = memory.primary.alloc(len(rows))
    if pages is None:
        return None
    page_size, req_to_token = memory.page_size, memory.req_to_token_pool.req_to_token
    if page_size == 1:
        req_to_token[rows, lens] = pages
    else:
        offsets = np.arange(page_size)
        req_to_token[rows[:, None], lens[:, None] + offsets] = pages[:, None] * page_size + offsets
    return pages


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
