"""RadixCache: the prefix cache of requests, over one RadixTree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvcache.allocator import NO_PAGES, NO_SLOTS, BaseTokenToKVPoolAllocator, Pages, Slots
from kvcache.base_prefix_cache import NO_MATCH, BasePrefixCache, MatchResult
from kvcache.components.base import longest
from kvcache.components.holdings import GroupHoldings
from kvcache.pool import ReqToTokenPool
from kvcache.radix_key import RadixKey
from kvcache.radix_tree import RadixTree, resident_part, trim
from kvcache.request import CachedRequest
from kvcache.tenancy.marks import given_to, grow, keep_found_private, keep_private, may_be_given, withholds
from kvcache.tenancy.promotion import Promotion
from kvcache.tiers.moves import TierMoves
from kvcache.tree_node import NO_PARTS, TreeNode
from wire.request import NO_MARKS


class InsertResult(NamedTuple):
    """`prefix_len` tokens were in the tree before: the caller still owns its own pages of those."""

    prefix_len: int
    match: MatchResult  # of what is cached of the key now, canonical pages


class RadixCache(BasePrefixCache):
    """Finished and unfinished requests share the pages of equal prefixes."""

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        allocator: BaseTokenToKVPoolAllocator,
        tree: RadixTree,
        holdings: Sequence[GroupHoldings] = (),
        moves: TierMoves | None = None,
        promotion: Promotion | None = None,
    ) -> None:
        """`moves` backs up what is inserted, where there is a host tier; `promotion` makes public what enough
        tenants insert, where tenants share."""
        super().__init__(req_to_token_pool, allocator, tree, holdings)
        self._moves = moves
        self._promotion = promotion
        self._offsets = np.arange(self.page_size)
        self._trims = any(component.tenants is not None for component in tree.components)
        self._tells_ends = any(component.tells_ends for component in tree.others)

    # -- matching ----------------------------------------------------------------------------------

    def match_prefix(self, key: RadixKey) -> MatchResult:
        """The longest cached prefix of `key` that a forward can continue from; see BasePrefixCache.

        The node in which the match ends is split there, so that it can be locked exactly.
        """
        tree = self.tree
        path, cached = tree.walk(key)
        if tree.lower is None:
            left = tree.usable(path, cached // self.page_size) if tree.others else path
            return self._result(left, cached)
        whole = tree.usable(path, cached // self.page_size, with_host=True)
        resident, pages = resident_part(whole)
        total = pages + sum(node.num_pages for node in whole[len(resident) :])
        match = self._result(tree.usable(resident, pages), cached)
        on_host = total * self.page_size - len(match.device_indices)
        return match._replace(host_hit_length=on_host, last_host_node=whole[-1] if whole else None)

    def match_parts(self, key: RadixKey) -> MatchResult:
        """What each group has of the longest prefix that the primary group has; see BasePrefixCache."""
        path, pages = resident_part(self.tree.walk(key)[0])
        return self._result(path, pages * self.page_size)

    def _result(self, path: list[TreeNode], cached: int) -> MatchResult:
        """`cached`: tokens that the primary group has, which may be more than those of `path`."""
        tree = self.tree
        if not path:
            return MatchResult(NO_SLOTS, tree.root, NO_PARTS, cached)
        pages = tree.components[0].gather(path)
        slots: Slots = (pages.astype(np.int64)[:, None] * self.page_size + self._offsets).reshape(-1)
        parts = {c.name: c.gather(path) for c in tree.others} if tree.others else NO_PARTS
        return MatchResult(slots, path[-1], parts, cached)

    # -- growing -----------------------------------------------------------------------------------

    def insert(
        self,
        key: RadixKey,
        pages: Pages,
        priority: int = 0,
        chunked: bool = False,
        offers: Mapping[str, Pages] = NO_PARTS,
        is_copy: bool = False,
        below: TreeNode | None = None,
    ) -> InsertResult:
        """Cache `pages`, which hold the whole pages of `key`. The tree owns those it did not have before.

        `offers` has what the other groups can give, by group name (see their components). What a group takes
        is in the result; all else stays the caller's. Nothing is cached beyond the point where a forward
        could continue. Traversed nodes count a hit, unless this is one chunk of a longer prefill. `is_copy`:
        another worker has these pages, too. `below`: see RadixTree.walk.
        """
        tree, total = self.tree, len(pages)
        assert total == len(key) // self.page_size, "one page id for every whole page of the key"
        path, prefix_len = tree.walk(key, 0 if chunked else 1, below)
        for node in path:
            if node.priority < priority:  # max() would take longer, for each node of the path
                node.priority = priority
        found = prefix_len // self.page_size
        resident, start = (path, found) if tree.lower is None else resident_part(path)
        end = total
        if start < total:
            ends = [c.leaf_lengths(offers.get(c.name, NO_PAGES), total) for c in tree.others]
            end = max(start, longest(ends) if ends else total)
        if len(resident) < len(path):  # the others are on the host alone: they get the device pages, too
            path = tree.cut(path, end) if end < found else path
            tree.restore(path, pages)
        leaves = self._leaves_state(key, path)
        given = offers if key.marks is NO_MARKS else given_to(tree, key, path, offers)
        for component in tree.others:
            component.revive(path, given.get(component.name, NO_PAGES), leaves and min(found, end) == total)
        parent = path[-1] if path else tree.root
        if found < end and key.marks is NO_MARKS:
            path.append(tree.append(parent, key, pages[:end], found, priority, offers, is_copy))
        elif found < end:
            path += grow(tree, parent, key, pages[:end], found, priority, offers, is_copy)
        if key.marks is not NO_MARKS:
            path = keep_private(tree, key, path)
        if self._moves is not None:
            self._moves.consider(path)
        if self._promotion is not None:
            self._promotion.inserted(key.tenant, path)
            for node in path if found < end else ():
                if not node.tenant and node.parent is parent:
                    self._promotion.arrived(node)
        return InsertResult(start * self.page_size, self._result(path, end * self.page_size))

    def insert_copy(
        self,
        key: RadixKey,
        pages: Pages,
        priority: int,
        offers: Mapping[str, Pages],
        below: TreeNode | None,
    ) -> MatchResult:
        path = self.tree.cut(below.path(), len(key) // self.page_size) if below is not None else []
        last = path[-1] if path else None
        if not self._takes_copy(key, last):
            return NO_MATCH
        ids = np.concatenate([node.value for node in path] + [pages]).astype(np.int32)
        return self.insert(key, ids, priority, True, offers, is_copy=True, below=last).match

    def _takes_copy(self, key: RadixKey, last: TreeNode | None) -> bool:
        """Whether a copy may be added to the path of `last`, which its reader has locked: not to what has got
        another owner, or gave way to public pages. And whether public nodes that are on the host alone may
        get its device pages: nothing locks them, so not where a tenant leaves no state to go on from."""
        if self._promotion is not None and not self._promotion.may_grow(key, last):
            return False
        if self.tree.lower is None:
            return True
        path, cached = self.tree.walk(key, below=last)
        is_end = bool(path) and cached == len(key) and not path[-1].is_resident
        ends_without_state = is_end and self._tells_ends and not self._leaves_state(key, path)
        return not ends_without_state and may_be_given(self.tree, key, last)

    def _leaves_state(self, key: RadixKey, path: Sequence[TreeNode]) -> bool:
        """Whether a state may stay at the end of a path. A tenant leaves none on a public node: it would show
        others where the tenant's prompt ended. The end of a prefix that the operator has named shows
        nothing."""
        return not key.tenant or not path or bool(path[-1].tenant) or self._ends_as_named(key)

    # -- locks -------------------------------------------------------------------------------------

    def inc_lock_ref(self, node: TreeNode | None) -> None:
        """Keep what a match that ends at `node` needs from eviction. None and the root need no lock."""
        if node is not None:
            self.tree.lock(node)

    def dec_lock_ref(self, node: TreeNode | None) -> None:
        """Undo one inc_lock_ref of the same node."""
        if node is not None:
            self.tree.unlock(node)

    # -- requests ----------------------------------------------------------------------------------
    #
    #   0 ........ protected ........ prefix ........ cached ........ committed ........ allocated
    #   in the tree, locked  in the tree    new in the    the partial last page, unused slots, and what
    #   for this request     already: the   tree          cannot be continued from: freed when the request
    #                        request's                    ends, else still its own
    #                        copy is freed

    def cache_unfinished_req(self, req: CachedRequest, chunked: bool = False) -> None:
        """Cache the committed whole pages. The request's row then names the tree's pages, locked for it."""
        self._cache(req, chunked, ends=False)
        req.prefix_indices = self._row_slots(req, 0, req.kv_committed_len).astype(np.int64)
        if self._trims:
            trim(self.tree, req.tenant_key)

    def cache_finished_req(self, req: CachedRequest, is_insert: bool = True) -> None:
        """Cache the committed whole pages; free and unlock all else."""
        if is_insert:
            self._cache(req, chunked=False, ends=True)
        self._release(req, req.cache_protected_len)
        self.dec_lock_ref(req.last_node)
        req.last_node = None
        req.cache_protected_len = 0
        if self._trims:
            trim(self.tree, req.tenant_key)

    def _cache(self, req: CachedRequest, chunked: bool, ends: bool) -> None:
        """Insert as much as every group can give, free the duplicates, and lock the result."""
        key = RadixKey(req.fill_ids[: req.kv_committed_len], req.namespace, req.tenant_key, req.marks)
        length = self._insertable(req, len(key) // self.page_size * self.page_size)
        if length >= max(req.cache_protected_len, 1):
            for holdings in self._holdings:  # first: what is evicted may be on the key's way
                holdings.make_room(ends)
        grows = self._promotion is None or self._promotion.may_grow(key[:length], req.last_node)
        gives = may_be_given(self.tree, key, req.last_node)
        if not grows or not gives or self._would_tell(key[:length]):
            keep_found_private(self.tree, key, req.last_node)
            return
        if length < max(req.cache_protected_len, 1):
            for node in req.last_node.path() if req.last_node is not None and not chunked else ():
                node.hit_count += 1
            keep_found_private(self.tree, key, req.last_node)
            return
        offers: dict[str, Pages] = {}
        for holdings in self._holdings:
            offer = holdings.offer(req, length, ends)
            if offer is None:
                return
            if withholds(self.tree, key[:length], req.last_node, holdings.name, offer):
                keep_found_private(self.tree, key, req.last_node)
                return
            offers[holdings.name] = offer
        slots, protected = self._row_slots(req, 0, length), req.cache_protected_len
        pages = slots[:: self.page_size] // self.page_size
        inserted = self.insert(key[:length], pages, req.priority, chunked, offers, below=req.last_node)
        match = inserted.match
        assert len(match.device_indices) == length, "the request offered less than it said"
        self.allocator.free(slots[protected : inserted.prefix_len])
        assert req.req_pool_idx is not None, "the request has no row"
        self.req_to_token_pool.write(req.req_pool_idx, protected, match.device_indices[protected:])
        self.inc_lock_ref(match.last_device_node)
        for holdings in self._holdings:
            holdings.adopt(req, match.part(holdings.name))
        self.dec_lock_ref(req.last_node)
        req.last_node = match.last_device_node
        req.cache_protected_len = length

    def _ends_as_named(self, key: RadixKey) -> bool:
        """Whether `key` ends where a prefix of the operator's does."""
        return len(key) // self.page_size == key.whole_pages(self.page_size)

    def _would_tell(self, key: RadixKey) -> bool:
        """Whether `key` ends in a node that would be public, and would show that a tenant's forward did."""
        if key.marks is NO_MARKS or not key.tenant or not self._tells_ends:
            return False
        return len(key) // self.page_size <= key.public_pages(self.page_size) and not self._ends_as_named(key)

    def _insertable(self, req: CachedRequest, length: int) -> int:
        """The longest length, at most `length`, up to which every group can give its part."""
        before = -1
        while length != before:
            before = length
            for holdings in self._holdings:
                length = holdings.insertable(req, length)
        return length

    def cut_points(self, req: CachedRequest, total: int) -> tuple[int, ...]:
        """What the groups ask for, beyond what the request has already; see BasePrefixCache."""
        points = {point for holdings in self._holdings for point in holdings.cut_points(req, total)}
        if self._tells_ends and req.marks is not NO_MARKS:  # others go on where the operator's prefix ends
            key = RadixKey(req.fill_ids[:total], req.namespace, req.tenant_key, req.marks)
            points.add(key.whole_pages(self.page_size) * self.page_size)
        return tuple(sorted(point for point in points if req.cache_protected_len < point < total))
