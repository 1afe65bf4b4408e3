"""RadixCache: the one tree of cached prefixes = structure + components + eviction policy + observers.

The tree finds, splits, links and unlinks nodes. What a node means for memory is its components' business;
who hears of it, its observers'. Below the root a child is found by namespace and first page, below that by
its first page: prefixes of different namespaces meet nowhere.

Per node on the path a match costs one dict lookup and one comparison of bytes; nothing is done per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvcache.allocator import BaseTokenToKVPoolAllocator, Pages, Slots, expand_pages
from kvcache.base_prefix_cache import BasePrefixCache, MatchResult
from kvcache.components.base import TreeComponent, longest
from kvcache.components.full import FullComponent
from kvcache.events import EventRecorder
from kvcache.observer import TreeObserver
from kvcache.pool import ReqToTokenPool
from kvcache.radix_key import Namespace, RadixKey
from kvcache.request import NO_SLOTS, CachedRequest
from kvcache.snapshot import TreeSnapshot
from kvcache.state_slots import StateSlotPool
from kvcache.swa_allocator import NO_PAGES, SWATokenToKVPoolAllocator
from kvcache.tree_node import NO_PARTS, TOKEN_BYTES, TreeNode
from kvcache.tree_print import tree_lines
from wire.events import AnyEvent


class InsertResult(NamedTuple):
    """`prefix_len` tokens were in the tree before: the caller still owns its own pages of those."""

    prefix_len: int
    match: MatchResult  # of what is cached of the key now, canonical pages


class RadixCache(BasePrefixCache):
    """Prefixes of all namespaces under one root, which holds nothing and is never evicted."""

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        allocator: BaseTokenToKVPoolAllocator,
        policy: str = "lru",
        recorder: EventRecorder | None = None,
        components: Sequence[TreeComponent] = (),
        observers: Sequence[TreeObserver] = (),
        swa: SWATokenToKVPoolAllocator | None = None,
        states: StateSlotPool | None = None,
    ) -> None:
        """`components` are those of the groups besides the primary one. `recorder` turns KV events on."""
        super().__init__(req_to_token_pool, allocator, swa, states)
        self._full = FullComponent(allocator, policy)
        self._others: tuple[TreeComponent, ...] = (*components,)
        self._components: tuple[TreeComponent, ...] = (self._full, *self._others)
        self._recorder = recorder
        self._observers: tuple[TreeObserver, ...] = (*observers, recorder) if recorder else (*observers,)
        self._tick = 0
        self._offsets = np.arange(self.page_size)
        self.root = TreeNode(None, Namespace(""), b"", b"", 0, 0)

    # -- finding -----------------------------------------------------------------------------------

    def match_prefix(self, key: RadixKey, count_hit: bool = False) -> MatchResult:
        """As the base says. Splits the node in which the match ends, so that it can be locked exactly.

        With `count_hit` the matched nodes count a hit, as in `insert`.
        """
        path, cached = self._walk(key, int(count_hit))
        if self._others:
            pages = cached // self.page_size
            valid = [component.valid_lengths(path, pages) for component in self._others]
            path = self._cut(path, longest(valid))
        return self._result(path, cached)

    def match_parts(self, key: RadixKey) -> MatchResult:
        """As the base says."""
        path, cached = self._walk(key)
        return self._result(path, cached)._replace(state_slot=0)

    def _walk(self, key: RadixKey, hits: int = 0) -> tuple[list[TreeNode], int]:
        """Nodes that hold the longest cached prefix of `key`, and its length in units; each counts `hits`."""
        self._tick = tick = self._tick + 1
        extra = TOKEN_BYTES if key.namespace.is_bigram else 0
        stride = self.page_size * TOKEN_BYTES
        first = stride + extra
        end = len(key) // self.page_size * stride
        raw = key.tokens[: (end + extra) // TOKEN_BYTES].tobytes()
        path: list[TreeNode] = []
        at = 0
        child = self.root.children.get(key.namespace.seed + raw[:first]) if end else None
        while child is not None:
            if not raw.startswith(child.tokens, at):
                child = self._split(child, child.common_pages(raw, at, stride, extra))
            child.last_access = tick
            child.hit_count += hits
            path.append(child)
            at += child.num_tokens * TOKEN_BYTES
            child = child.children.get(raw[at : at + first]) if at < end else None
        if self._full.evictor.keys_fall:
            for component in self._components:
                component.evictor.touched(path)
        return path, at // TOKEN_BYTES

    def _cut(self, path: list[TreeNode], pages: int) -> list[TreeNode]:
        """The first `pages` pages of a path, its last node split if need be."""
        for i, node in enumerate(path):
            if pages < node.num_pages:
                return path[:i] + ([self._split(node, pages)] if pages else [])
            pages -= node.num_pages
        return path

    def _result(self, path: list[TreeNode], cached: int) -> MatchResult:
        """`cached`: length of what the primary group has, which may be longer than `path`."""
        if not path:
            return MatchResult(NO_SLOTS, self.root, self.root, 0, NO_PAGES, NO_PAGES, 0, cached)
        last = path[-1]
        pages = np.frombuffer(b"".join([node.page_ids for node in path]), np.int32)
        slots: Slots = (pages.astype(np.int64)[:, None] * self.page_size + self._offsets).reshape(-1)
        parts: dict[str, Any] = {}
        for component in self._others:
            parts |= component.gather(path)
        return MatchResult(slots, last, last, 0, pages, branching_len=cached, **parts)

    def _split(self, node: TreeNode, pages: int) -> TreeNode:
        upper = node.split(pages, self.page_size)
        if self._others:
            upper.parts = {}
            for component in self._others:
                component.split(upper, node)
        return upper

    # -- growing -----------------------------------------------------------------------------------

    def insert(
        self,
        key: RadixKey,
        pages: Pages,
        priority: int = 0,
        chunked: bool = False,
        offers: Mapping[str, Any] = NO_PARTS,
    ) -> InsertResult:
        """Cache `pages`, which hold the whole pages of `key`. The tree owns those it did not have before.

        `offers`, by component name: "window", a page id per page, 0 for none; "state", the slot of the state
        after the last page. What a component takes is in the result; all else stays the caller's. Nothing is
        cached beyond the point where a forward could continue: that would be a leaf of no use.
        Traversed nodes count a hit, unless this is one chunk of a longer prefill.
        """
        total = len(pages)
        assert total == len(key) // self.page_size, "one page id for every whole page of the key"
        path, prefix_len = self._walk(key, 0 if chunked else 1)
        for node in path:
            node.priority = max(node.priority, priority)
        start = end = prefix_len // self.page_size
        if start < total:
            ends = [c.leaf_lengths(offers.get(c.name, ()), total) for c in self._others]
            end = longest(ends) if ends else total
        for component in self._others:
            component.revive(path, offers.get(component.name, ()), start == total)
        if start < end:
            parent = path[-1] if path else self.root
            path.append(self._append(parent, key, pages[:end], start, priority, offers))
            for observer in self._observers:
                observer.stored(path[-1])
        return InsertResult(prefix_len, self._result(path, max(prefix_len, end * self.page_size)))

    def _append(
        self,
        parent: TreeNode,
        key: RadixKey,
        pages: Pages,
        start: int,
        priority: int,
        offers: Mapping[str, Any],
    ) -> TreeNode:
        """A new leaf for `pages[start:]`."""
        begin, end = start * self.page_size, len(pages) * self.page_size
        tokens = key[begin:end].tokens.tobytes()
        ids = pages[start:].astype(np.int32).tobytes()
        node = TreeNode(parent, key.namespace, tokens, ids, end - begin, self._tick)
        node.priority, node.tenant = priority, key.tenant
        parent.children[node.child_key(self.page_size)] = node
        self._full.insert(node, start, ())
        self._full.evictor.grown(parent, node)
        if self._others:
            node.parts = {}
            for component in self._others:
                component.insert(node, start, offers.get(component.name, ()))
        return node

    # -- locks -------------------------------------------------------------------------------------

    def inc_lock_ref(self, node: TreeNode | None) -> None:
        """As the base says; the root needs no lock."""
        if node is None or node is self.root:
            return
        for component in self._components:
            component.lock(node)

    def dec_lock_ref(self, node: TreeNode | None) -> None:
        """As the base says; a leaf that became a tombstone under the lock goes with the last one."""
        if node is None or node is self.root:
            return
        for component in self._components:
            component.unlock(node)
        self._settle(node)

    def _settle(self, node: TreeNode) -> None:
        """If `node` is an unlocked leaf now, it may be evicted; or it goes at once, being of no use."""
        while not (node.lock_ref or node.children or node is self.root):
            if not any(component.is_tombstone(node) for component in self._others):
                self._full.evictor.offer(node)
                return
            node = self._unlink(node)

    # -- requests ----------------------------------------------------------------------------------
    #
    #   0 ........ protected ........ prefix ........ cached .... committed .... allocated
    #   the tree's, locked  the tree had  the tree's     partial page and over-allocation, and what
    #   for this request    it already:   from now on    no other group can continue from:
    #                       ours is freed                freed when finished, still private when not

    def cache_unfinished_req(self, req: CachedRequest, chunked: bool = False) -> None:
        """As the base says. The request's row then names the tree's pages, and its lock moves there."""
        self._cache(req, chunked, ends=False)
        req.prefix_indices = self._row_slots(req, 0, req.kv_committed_len)

    def cache_finished_req(self, req: CachedRequest, is_insert: bool = True) -> None:
        """As the base says."""
        if is_insert:
            self._cache(req, chunked=False, ends=True)
        self.allocator.free_page_ids(self._row_pages(req, req.cache_protected_len, req.kv_allocated_len))
        self._release_parts(req)
        self.dec_lock_ref(req.last_node)
        req.last_node = None
        req.cache_protected_len = 0

    def _cache(self, req: CachedRequest, chunked: bool, ends: bool) -> None:
        """Insert as much as every group can give, free what the tree had already, lock what it has now."""
        key = RadixKey(req.fill_ids[: req.kv_committed_len], req.namespace, req.tenant)
        length = self._insertable(req, len(key) // self.page_size * self.page_size)
        if length < max(req.cache_protected_len, 1):
            for node in req.last_node.path() if req.last_node is not None and not chunked else ():
                node.hit_count += 1
            return
        offers = {component.name: component.offer(req, length, ends) for component in self._others}
        if any(offer is None for offer in offers.values()):
            return
        pages = self._row_pages(req, 0, length)
        inserted = self.insert(key[:length], pages, req.priority, chunked, offers)
        match, protected = inserted.match, req.cache_protected_len
        assert len(match.device_indices) == length, "the request offered less than it said"
        self.allocator.free_page_ids(self._row_pages(req, protected, inserted.prefix_len))
        assert req.req_pool_idx is not None, "the request has no row"
        self.req_to_token_pool.write(req.req_pool_idx, protected, match.device_indices[protected:])
        self.inc_lock_ref(match.last_device_node)
        for component in self._others:
            component.adopt(req, match)
        self.dec_lock_ref(req.last_node)
        req.last_node = match.last_device_node
        req.cache_protected_len = length

    def _insertable(self, req: CachedRequest, length: int) -> int:
        """The longest length, at most `length`, up to which every group can give its part."""
        before = -1
        while length != before:
            before = length
            for component in self._others:
                length = component.insertable(req, length)
        return length

    def cut_points(self, req: CachedRequest, total: int) -> tuple[int, ...]:
        """What the components ask for, merged; beyond what the request has already."""
        points = {point for component in self._others for point in component.cut_points(req, total)}
        return tuple(sorted(point for point in points if req.cache_protected_len < point < total))

    # -- shrinking ---------------------------------------------------------------------------------

    def evict(self, num_tokens: int) -> int:
        """As the base says, in policy order; may free more by part of one node."""
        return self._evict(self._full, num_tokens)

    def evict_window(self, num_pages: int) -> int:
        """As the base says: pages alone, or an unlocked leaf with all it holds."""
        return sum(self._evict(c, num_pages) for c in self._others if c.name == "window")

    def evict_mamba(self, num_slots: int) -> int:
        """As the base says: states alone, or an unlocked leaf with all it holds."""
        return sum(self._evict(c, num_slots) for c in self._others if c.name == "state")

    def _evict(self, component: TreeComponent, wanted: int) -> int:
        before = component.evictable_size()
        left = before - wanted
        while component.evictable_size() > left:
            node = component.evictor.pop(component.may_evict)
            if node is None:
                break
            is_free_leaf = not node.children and not node.lock_ref
            component.shrink(node, component.evictable_size() - left, is_free_leaf)
            if is_free_leaf and component.evictable_size() > left:
                self._settle(self._unlink(node))
            elif component.may_evict(node):
                component.evictor.offer(node)
        return before - component.evictable_size()

    def _unlink(self, node: TreeNode) -> TreeNode:
        """Free an unlocked leaf; returns its parent, which may be of no use now."""
        for observer in self._observers:
            observer.removed(node)
        for component in self._components:
            component.free(node)
        parent = node.parent
        assert parent is not None, "the root never goes"
        del parent.children[node.child_key(self.page_size)]
        return parent

    def reset(self) -> None:
        """As the base says."""
        assert self.protected_size() == 0, "somebody still holds a lock"
        for node in self.nodes():
            for component in self._components:
                component.free(node)
        for component in self._components:
            component.evictor.clear()
        self.root.children.clear()
        for observer in self._observers:
            observer.cleared()

    # -- looking -----------------------------------------------------------------------------------

    def nodes(self) -> Iterator[TreeNode]:
        """Every node but the root, parents before children."""
        return self.root.descendants()

    def evictable_size(self) -> int:
        """Tokens of unlocked nodes."""
        return self._full.evictable_size()

    def protected_size(self) -> int:
        """Tokens of locked nodes."""
        return self._full.protected_size()

    def evictable_window_pages(self) -> int:
        """As the base says."""
        return sum(c.evictable_size() for c in self._others if c.name == "window")

    def evictable_states(self) -> int:
        """As the base says."""
        return sum(c.evictable_size() for c in self._others if c.name == "state")

    def check(self) -> None:
        """As the base says; and no unlocked leaf is a tombstone."""
        nodes = list(self.nodes())
        for component in self._components:
            component.check(nodes)
        for node in nodes:
            if not node.children and not node.lock_ref:
                for component in self._others:
                    assert not component.is_tombstone(node), f"a leaf that is a {component.name} tombstone"

    def all_pages(self) -> Pages:
        """As the base says."""
        return self._full.all_pages(self.nodes())

    def all_parts(self) -> dict[str, Pages]:
        """As the base says."""
        return {component.name: component.all_pages(self.nodes()) for component in self._others}

    def all_values_flatten(self) -> Slots:
        """Every cached slot, in no order."""
        return expand_pages(self.all_pages(), self.page_size)

    def held(self, node: TreeNode) -> dict[str, int]:
        """By component name, what it keeps on a node: tokens, window pages, states."""
        return {component.name: component.held(node) for component in self._components}

    def take_events(self) -> list[AnyEvent]:
        """KV events since the last call; after an overflow, a clear and all that is cached now."""
        return self._recorder.take_events(self.nodes()) if self._recorder else []

    def snapshot(self) -> TreeSnapshot | None:
        """As the base says."""
        return self._recorder.snapshot(self.nodes()) if self._recorder else None

    def pretty_print(self) -> str:
        """A line of sums, then one line per node."""
        sums = f"{self.total_size()} tokens cached, {self.protected_size()} protected"
        return "\n".join([sums, *tree_lines(self.nodes(), self._components)])
