"""BasePrefixCache: what a scheduler may ask of any prefix cache, and what all of them do alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache.allocator import NO_PAGES, NO_SLOTS, BaseTokenToKVPoolAllocator, Pages, Slots
from kvcache.components.holdings import GroupHoldings
from kvcache.pool import ReqToTokenPool
from kvcache.radix_key import RadixKey
from kvcache.radix_tree import RadixTree
from kvcache.request import CachedRequest
from kvcache.tree_node import NO_PARTS, TreeNode


class MatchResult(NamedTuple):
    """What is cached of a key. Nothing is locked: lock `last_device_node` before anything else is evicted."""

    device_indices: Slots  # of the matched tokens; whole pages
    last_device_node: TreeNode | None
    parts: Mapping[str, Pages]  # by group name, what groups besides the primary one have of the match
    branching_len: int  # tokens, whole pages, that are cached by the primary group alone
    host_hit_length: int = 0  # more tokens that could be continued from, once what is on the host is loaded
    last_host_node: TreeNode | None = None  # where the match then ends

    def part(self, group: str) -> Pages:
        """Of a window group one page id per page of the match, 0 where none is held. Of a state group the one
        slot of the state after the match, or 0. Empty if nothing matched."""
        return self.parts.get(group, NO_PAGES)


NO_MATCH = MatchResult(NO_SLOTS, None, NO_PARTS, 0)


class BasePrefixCache(ABC):
    """A cache over one ReqToTokenPool, the primary group's allocator and a tree, which evicts."""

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        allocator: BaseTokenToKVPoolAllocator,
        tree: RadixTree,
        holdings: Sequence[GroupHoldings] = (),
    ) -> None:
        """`holdings`: what requests hold of the groups besides the primary one."""
        self.req_to_token_pool = req_to_token_pool
        self.allocator = allocator
        self.page_size = allocator.page_size
        self.tree = tree
        self._holdings: tuple[GroupHoldings, ...] = (*holdings,)

    @abstractmethod
    def match_prefix(self, key: RadixKey) -> MatchResult:
        """The longest cached prefix of `key`, in whole pages, that a forward can continue from.

        A caller that will run a forward passes at most all but the last token: that one must be computed.
        """

    @abstractmethod
    def match_parts(self, key: RadixKey) -> MatchResult:
        """What each group has of `key`: the longest prefix of the primary group, whatever the others lack.

        A window group's part may have holes, and a state group's may be 0.
        """

    @abstractmethod
    def inc_lock_ref(self, node: TreeNode | None) -> None:
        """Keep everything up to `node` from eviction."""

    @abstractmethod
    def dec_lock_ref(self, node: TreeNode | None) -> None:
        """Undo one inc_lock_ref of the same node."""

    @abstractmethod
    def cache_unfinished_req(self, req: CachedRequest, chunked: bool = False) -> None:
        """Cache the committed whole pages of a request that continues, and lock them for it."""

    @abstractmethod
    def cache_finished_req(self, req: CachedRequest, is_insert: bool = True) -> None:
        """Cache the committed whole pages of a request that ends; free and unlock all else that it holds.

        With `is_insert` false nothing is cached. The request keeps its row.
        """

    def insert_copy(
        self,
        key: RadixKey,
        pages: Pages,
        priority: int,
        offers: Mapping[str, Pages],
        below: TreeNode | None,
    ) -> MatchResult:
        """Cache `pages`, which came from another worker: they are evicted before what was computed here.
        They follow the path of `below`, which the caller has locked; if `key` ends within that, there are
        none. Returns what is cached of the key now: canonical pages; nothing if no copy may be added there.
        All others of `pages` and `offers` stay the caller's."""
        del key, pages, priority, offers, below
        return NO_MATCH

    def cut_points(self, req: CachedRequest, total: int) -> tuple[int, ...]:
        """Lengths below `total` at which a forward of this request should end, ascending."""
        del req, total
        return ()

    def _release(self, req: CachedRequest, start: int) -> None:
        """Free the request's slots from position `start`, a page border, and all that it holds of the groups
        besides the primary one."""
        self.allocator.free(self._row_slots(req, start, req.kv_allocated_len))
        for holdings in self._holdings:
            holdings.release(req)

    def _row_slots(self, req: CachedRequest, start: int, end: int) -> npt.NDArray[np.int32]:
        """Slots of a request's positions [start, end), a view."""
        assert req.req_pool_idx is not None, "the request has no row"
        return self.req_to_token_pool.req_to_token[req.req_pool_idx, start:end]
