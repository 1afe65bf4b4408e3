"""BasePrefixCache: what a scheduler may ask of any prefix cache, and what all of them do alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache.allocator import BaseTokenToKVPoolAllocator, Pages, Slots
from kvcache.pool import ReqToTokenPool
from kvcache.radix_key import RadixKey
from kvcache.request import NO_SLOTS, CachedRequest
from kvcache.tree_node import TreeNode
from wire.events import AnyEvent

NO_PAGES: Pages = np.empty(0, np.int32)


class MatchResult(NamedTuple):
    """What is cached of a key. Nothing is locked: lock `last_device_node` before anything else is evicted."""

    device_indices: Slots  # of the matched tokens; whole pages
    last_device_node: TreeNode | None
    last_host_node: TreeNode | None  # the same node as long as there is no host tier
    host_hit_length: int  # tokens beyond device_indices that the host tier holds
    pages: Pages  # device_indices as page ids


NO_MATCH = MatchResult(NO_SLOTS, None, None, 0, NO_PAGES)


class BasePrefixCache(ABC):
    """A cache over one ReqToTokenPool and one allocator. Sizes are in tokens."""

    def __init__(self, req_to_token_pool: ReqToTokenPool, allocator: BaseTokenToKVPoolAllocator) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.allocator = allocator
        self.page_size = allocator.page_size

    @abstractmethod
    def match_prefix(self, key: RadixKey) -> MatchResult:
        """The longest cached prefix of `key`, in whole pages.

        A caller about to run a forward passes at most all but the last token: that one must be computed.
        """

    @abstractmethod
    def inc_lock_ref(self, node: TreeNode | None) -> None:
        """Keep everything up to `node` from eviction."""

    @abstractmethod
    def dec_lock_ref(self, node: TreeNode | None) -> None:
        """Undo one inc_lock_ref of the same node."""

    @contextmanager
    def locked(self, node: TreeNode | None) -> Iterator[None]:
        """A lock for the length of a block."""
        self.inc_lock_ref(node)
        try:
            yield
        finally:
            self.dec_lock_ref(node)

    @abstractmethod
    def cache_unfinished_req(self, req: CachedRequest, chunked: bool = False) -> None:
        """Take over the committed whole pages of a request that goes on, and lock them for it."""

    @abstractmethod
    def cache_finished_req(self, req: CachedRequest, is_insert: bool = True) -> None:
        """Take over the committed whole pages of a request that ends; free and unlock all else it had.

        With `is_insert` false nothing is taken over. The request's row stays its own.
        """

    def cut_points(self, req: CachedRequest, total: int) -> tuple[int, ...]:
        """Lengths below `total` at which a forward of this request should end, ascending."""
        del req, total
        return ()

    @abstractmethod
    def evict(self, num_tokens: int) -> int:
        """Free unlocked leaves until `num_tokens` are free or none is left; returns tokens freed."""

    @abstractmethod
    def reset(self) -> None:
        """Free everything cached. Nothing may be locked."""

    @abstractmethod
    def evictable_size(self) -> int:
        """Tokens that evict can free."""

    @abstractmethod
    def protected_size(self) -> int:
        """Tokens under a lock."""

    def total_size(self) -> int:
        """Tokens cached."""
        return self.evictable_size() + self.protected_size()

    def recount(self) -> tuple[int, int]:
        """(evictable, protected) tokens, counted anew; what the sizes above must equal."""
        return 0, 0

    @abstractmethod
    def all_pages(self) -> Pages:
        """Every cached page, in no order."""

    @abstractmethod
    def all_values_flatten(self) -> Slots:
        """Every cached slot, in no order."""

    @abstractmethod
    def pretty_print(self) -> str:
        """The cache as text, for a person."""

    def take_events(self) -> list[AnyEvent]:
        """KV events since the last call; empty when events are off."""
        return []

    def _row_pages(self, req: CachedRequest, start: int, end: int) -> Pages:
        """Page ids of a request's positions [start, end); `start` is a page border."""
        assert req.req_pool_idx is not None, "the request has no row"
        slots = self.req_to_token_pool.req_to_token[req.req_pool_idx, start : end : self.page_size]
        return slots // self.page_size

    def _row_slots(self, req: CachedRequest, start: int, end: int) -> npt.NDArray[np.int64]:
        assert req.req_pool_idx is not None, "the request has no row"
        return self.req_to_token_pool.req_to_token[req.req_pool_idx, start:end].astype(np.int64)
