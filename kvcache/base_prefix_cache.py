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
from kvcache.snapshot import TreeSnapshot
from kvcache.state_slots import StateSlotPool
from kvcache.swa_allocator import NO_PAGES as NO_PAGES
from kvcache.swa_allocator import SWATokenToKVPoolAllocator
from kvcache.tree_node import TreeNode
from wire.events import AnyEvent


class MatchResult(NamedTuple):
    """What is cached of a key. Nothing is locked: lock `last_device_node` before anything else is evicted."""

    device_indices: Slots  # of the matched tokens; whole pages
    last_device_node: TreeNode | None
    last_host_node: TreeNode | None  # the same node as long as there is no host tier
    host_hit_length: int  # tokens beyond device_indices that the host tier holds
    pages: Pages  # device_indices as page ids
    window_pages: Pages = NO_PAGES  # per page of the match, the window group's page id; 0: not held
    state_slot: int = 0  # slot of the state after the match; 0: none held there
    branching_len: int = 0  # tokens, whole pages, that are cached by the primary group alone


NO_MATCH = MatchResult(NO_SLOTS, None, None, 0, NO_PAGES)


class BasePrefixCache(ABC):
    """A cache over one ReqToTokenPool and one allocator of the primary group. Sizes are in its tokens.

    `swa` and `states` are what live requests hold of the window and the state group, where the model has one.
    """

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        allocator: BaseTokenToKVPoolAllocator,
        swa: SWATokenToKVPoolAllocator | None = None,
        states: StateSlotPool | None = None,
    ) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.allocator = allocator
        self.page_size = allocator.page_size
        self.swa = swa
        self.states = states
        if swa is not None:
            swa.evict, swa.evictable_pages = self.evict_window, self.evictable_window_pages
        if states is not None:
            states.evict, states.evictable_slots = self.evict_mamba, self.evictable_states

    @abstractmethod
    def match_prefix(self, key: RadixKey) -> MatchResult:
        """The longest cached prefix of `key`, in whole pages, that a forward can continue from.

        A caller about to run a forward passes at most all but the last token: that one must be computed.
        """

    @abstractmethod
    def match_parts(self, key: RadixKey) -> MatchResult:
        """What each group has of `key`: the longest prefix of the primary group, whatever the others lack.

        `window_pages` may have holes and `state_slot` is 0: who asks brings the state itself.
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

    def evict_window(self, num_pages: int) -> int:
        """Free unlocked window pages until `num_pages` are free or none is left; returns how many."""
        del num_pages
        return 0

    def evict_mamba(self, num_slots: int) -> int:
        """Free unlocked cached states until `num_slots` are free or none is left; returns how many."""
        del num_slots
        return 0

    def evictable_window_pages(self) -> int:
        """Pages that evict_window can free."""
        return 0

    def evictable_states(self) -> int:
        """Slots that evict_mamba can free."""
        return 0

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

    @abstractmethod
    def check(self) -> None:
        """Assert that the sizes above are what counting anew gives, and the other rules of the structure."""

    @abstractmethod
    def all_pages(self) -> Pages:
        """Every cached page of the primary group, in no order."""

    def all_parts(self) -> dict[str, Pages]:
        """Every cached page or slot of the other groups, by group name, in no order."""
        return {}

    @abstractmethod
    def all_values_flatten(self) -> Slots:
        """Every cached slot, in no order."""

    @abstractmethod
    def pretty_print(self) -> str:
        """The cache as text, for a person."""

    def take_events(self) -> list[AnyEvent]:
        """KV events since the last call; empty when events are off."""
        return []

    def snapshot(self) -> TreeSnapshot | None:
        """All that is cached: what who has read every event taken so far knows. None when events are off."""
        return None

    def _release_parts(self, req: CachedRequest) -> None:
        """Free and unlock what a request holds of the groups besides the primary one."""
        assert req.req_pool_idx is not None, "the request has no row"
        if self.swa is not None:
            self.swa.allocator.free_page_ids(self.swa.release(req.req_pool_idx))
        if self.states is not None and req.state_hold is not None:
            self.states.free(req.state_hold.private)
            req.state_hold = None

    def _row_pages(self, req: CachedRequest, start: int, end: int) -> Pages:
        """Page ids of a request's positions [start, end); `start` is a page border."""
        assert req.req_pool_idx is not None, "the request has no row"
        slots = self.req_to_token_pool.req_to_token[req.req_pool_idx, start : end : self.page_size]
        return slots // self.page_size

    def _row_slots(self, req: CachedRequest, start: int, end: int) -> npt.NDArray[np.int64]:
        assert req.req_pool_idx is not None, "the request has no row"
        return self.req_to_token_pool.req_to_token[req.req_pool_idx, start:end].astype(np.int64)
