"""RadixCache: the one tree of cached prefixes = structure + components + eviction policy + observers.

The tree finds, splits, links and unlinks nodes. What a node means for memory is its components' business;
who hears of it, its observers'. A child is found by (namespace seed, first page's tokens): prefixes of
different namespaces meet nowhere.

Per node on the path a match costs one dict lookup and one comparison of bytes; nothing is done per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvcache.allocator import BaseTokenToKVPoolAllocator, Pages, Slots, expand_pages
from kvcache.base_prefix_cache import NO_PAGES, BasePrefixCache, MatchResult
from kvcache.components.base import TreeComponent
from kvcache.components.full import FullComponent
from kvcache.events import EventRecorder
from kvcache.eviction import Evictor, eviction_policy
from kvcache.observer import TreeObserver
from kvcache.pool import ReqToTokenPool
from kvcache.radix_key import Namespace, RadixKey
from kvcache.request import NO_SLOTS, CachedRequest
from kvcache.state_slots import StateSlotPool
from kvcache.swa_allocator import SWATokenToKVPoolAllocator
from kvcache.tree_node import TOKEN_BYTES, TreeNode
from wire.events import AnyEvent


class InsertResult(NamedTuple):
    """`prefix_len` tokens were in the tree before: the caller still owns its own pages of those."""

    prefix_len: int
    match: MatchResult  # of the whole key, canonical pages


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
        """`components` come in addition to FullComponent; `recorder` turns KV events on."""
        super().__init__(req_to_token_pool, allocator, swa, states)
        self._policy = eviction_policy(policy)
        self._full = FullComponent(allocator)
        self._components: tuple[TreeComponent, ...] = (self._full, *components)
        self._recorder = recorder
        self._observers: tuple[TreeObserver, ...] = (*observers, recorder) if recorder else (*observers,)
        self._tick = 0
        self.root = TreeNode(None, Namespace(""), b"", NO_PAGES, 0, 0)
        self._evictor = Evictor(self._policy)

    # -- finding -----------------------------------------------------------------------------------

    def match_prefix(self, key: RadixKey) -> MatchResult:
        """As the base says. Splits the node in which the match ends, so that it can be locked exactly."""
        path, _ = self._walk(key)
        self._reoffer(path)
        for component in self._components:
            del path[component.valid_nodes(path) :]
        return self._result(path)

    def match_parts(self, key: RadixKey) -> MatchResult:
        """As the base says."""
        return self.match_prefix(key)

    def _walk(self, key: RadixKey) -> tuple[list[TreeNode], int]:
        """Nodes that hold the longest cached prefix of `key`, and its length in units."""
        self._tick = tick = self._tick + 1
        namespace = key.namespace
        seed = namespace.seed
        extra = TOKEN_BYTES if namespace.is_bigram else 0
        stride = self.page_size * TOKEN_BYTES
        end = len(key) // self.page_size * stride
        raw = key.tokens[: (end + extra) // TOKEN_BYTES].tobytes()
        path: list[TreeNode] = []
        node, at = self.root, 0
        while at < end:
            child = node.children.get((seed, raw[at : at + stride + extra]))
            if child is None:
                break
            if not raw.startswith(child.tokens, at):
                pages = _common_pages(child.tokens, raw, at, stride, extra)
                child = self._split(child, pages)
            child.last_access = tick
            path.append(child)
            at += child.num_tokens * TOKEN_BYTES
            node = child
        return path, at // TOKEN_BYTES

    def _reoffer(self, path: list[TreeNode]) -> None:
        """Of all nodes touched only the last can be a leaf, and so on offer: bring its place up to date."""
        if path and path[-1].offer:
            self._evictor.offer(path[-1])

    def _result(self, path: list[TreeNode]) -> MatchResult:
        if not path:
            return MatchResult(NO_SLOTS, self.root, self.root, 0, NO_PAGES)
        pages = np.concatenate([node.value for node in path])
        last = path[-1]
        return MatchResult(expand_pages(pages, self.page_size), last, last, 0, pages)

    def _split(self, node: TreeNode, pages: int) -> TreeNode:
        upper = node.split(pages, self.page_size)
        for component in self._components:
            component.split(upper, node)
        return upper

    # -- growing -----------------------------------------------------------------------------------

    def insert(self, key: RadixKey, pages: Pages, priority: int = 0, chunked: bool = False) -> InsertResult:
        """Cache `pages`, which hold the whole pages of `key`. The tree owns those it did not have before.

        Traversed nodes count a hit, unless this is one chunk of a longer prefill.
        """
        assert len(pages) == len(key) // self.page_size, "one page id for every whole page of the key"
        path, prefix_len = self._walk(key)
        for node in path:
            node.priority = max(node.priority, priority)
            if not chunked:
                node.hit_count += 1
        self._reoffer(path)
        if prefix_len < len(pages) * self.page_size:
            path.append(self._append(path[-1] if path else self.root, key, pages, prefix_len, priority))
        return InsertResult(prefix_len, self._result(path))

    def _append(self, parent: TreeNode, key: RadixKey, pages: Pages, start: int, priority: int) -> TreeNode:
        end = len(pages) * self.page_size
        rest = key[start:end]
        value = pages[start // self.page_size :].astype(np.int32)
        node = TreeNode(parent, key.namespace, rest.tokens.tobytes(), value, end - start, self._tick)
        node.priority = priority
        node.tenant = key.tenant
        parent.children[node.child_key(self.page_size)] = node
        self._evictor.withdraw(parent)
        self._evictor.offer(node)
        for component in self._components:
            component.insert(node)
        for observer in self._observers:
            observer.stored(node)
        return node

    # -- locks -------------------------------------------------------------------------------------

    def inc_lock_ref(self, node: TreeNode | None) -> None:
        """As the base says; the root needs no lock."""
        if node is None or node is self.root:
            return
        for component in self._components:
            component.lock(node)
        self._evictor.withdraw(node)

    def dec_lock_ref(self, node: TreeNode | None) -> None:
        """As the base says; an unlocked leaf may be evicted again."""
        if node is None or node is self.root:
            return
        for component in self._components:
            component.unlock(node)
        self._offer_if_free_leaf(node)

    def _offer_if_free_leaf(self, node: TreeNode) -> None:
        if node.lock_ref == 0 and not node.children and node is not self.root:
            self._evictor.offer(node)

    # -- requests ----------------------------------------------------------------------------------
    #
    #   0 ........ protected ........ prefix ........ aligned .... committed .... allocated
    #   the tree's, locked  the tree had  the tree's     partial page and over-allocation:
    #   for this request    it already:   from now on    freed when finished,
    #                       ours is freed                still private when not

    def cache_unfinished_req(self, req: CachedRequest, chunked: bool = False) -> None:
        """As the base says. The request's row then names the tree's pages, and its lock moves there."""
        inserted = self._insert_committed(req, chunked)
        aligned = len(inserted.match.pages) * self.page_size
        assert req.req_pool_idx is not None, "the request has no row"
        canonical = inserted.match.device_indices
        self.req_to_token_pool.write(
            req.req_pool_idx, req.cache_protected_len, canonical[req.cache_protected_len :]
        )
        old, req.last_node = req.last_node, inserted.match.last_device_node
        self.inc_lock_ref(req.last_node)
        self.dec_lock_ref(old)
        req.cache_protected_len = aligned
        tail = self._row_slots(req, aligned, req.kv_committed_len)
        req.prefix_indices = np.concatenate((canonical, tail))

    def cache_finished_req(self, req: CachedRequest, is_insert: bool = True) -> None:
        """As the base says."""
        kept = req.cache_protected_len
        if is_insert:
            kept = len(self._insert_committed(req, chunked=False).match.pages) * self.page_size
        self.allocator.free_page_ids(self._row_pages(req, kept, req.kv_allocated_len))
        self.dec_lock_ref(req.last_node)
        req.last_node = None
        req.cache_protected_len = 0

    def _insert_committed(self, req: CachedRequest, chunked: bool) -> InsertResult:
        """Insert the committed whole pages and free those that the tree had already."""
        key = RadixKey(req.fill_ids[: req.kv_committed_len], req.namespace, req.tenant)
        aligned = len(key) // self.page_size * self.page_size
        inserted = self.insert(key, self._row_pages(req, 0, aligned), req.priority, chunked)
        self.allocator.free_page_ids(self._row_pages(req, req.cache_protected_len, inserted.prefix_len))
        return inserted

    def cut_points(self, req: CachedRequest, total: int) -> tuple[int, ...]:
        """What the components ask for, merged."""
        points: set[int] = set()
        for component in self._components:
            points.update(component.cut_points(req.cache_protected_len, total))
        return tuple(sorted(points))

    # -- shrinking ---------------------------------------------------------------------------------

    def evict(self, num_tokens: int) -> int:
        """As the base says, in policy order; may free more by part of one node."""
        freed = 0
        while freed < num_tokens and (node := self._evictor.pop()) is not None:
            freed += self._remove_leaf(node)
        return freed

    def _remove_leaf(self, node: TreeNode) -> int:
        for observer in self._observers:
            observer.removed(node)
        freed = self._full.free(node)
        for component in self._components[1:]:
            component.free(node)
        parent = node.parent
        assert parent is not None, "the root is never on offer"
        del parent.children[node.child_key(self.page_size)]
        self._offer_if_free_leaf(parent)
        return freed

    def reset(self) -> None:
        """As the base says."""
        assert self.protected_size() == 0, "somebody still holds a lock"
        for node in self.nodes():
            for component in self._components:
                component.free(node)
        self.root.children.clear()
        self._evictor = Evictor(self._policy)
        for observer in self._observers:
            observer.cleared()

    # -- looking -----------------------------------------------------------------------------------

    def nodes(self) -> Iterator[TreeNode]:
        """Every node but the root, parents before children."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def evictable_size(self) -> int:
        """Tokens of unlocked nodes."""
        return self._full.evictable_size()

    def protected_size(self) -> int:
        """Tokens of locked nodes."""
        return self._full.protected_size()

    def check(self) -> None:
        """As the base says."""
        protected = sum(node.num_tokens for node in self.nodes() if node.lock_ref)
        total = sum(node.num_tokens for node in self.nodes())
        assert protected == self.protected_size(), "protected_size is not the sum over locked nodes"
        assert total - protected == self.evictable_size(), "evictable_size is not the sum over unlocked nodes"

    def all_pages(self) -> Pages:
        """Every cached page, in no order."""
        return np.concatenate([NO_PAGES, *(node.value for node in self.nodes())])

    def all_values_flatten(self) -> Slots:
        """Every cached slot, in no order."""
        return expand_pages(self.all_pages(), self.page_size)

    def take_events(self) -> list[AnyEvent]:
        """KV events since the last call; after an overflow, a clear and all that is cached now."""
        return self._recorder.take_events(self.nodes()) if self._recorder else []

    def pretty_print(self) -> str:
        """One line per node, indented by depth."""
        lines = [f"{self.total_size()} tokens cached, {self.protected_size()} protected"]
        for node in self.nodes():
            tokens = node.token_array()
            shown = " ".join(map(str, tokens[:8])) + (" ..." if len(tokens) > 8 else "")
            lines.append(
                f"{'  ' * len(node.path())}{node.num_tokens} tokens [{shown}] "
                f"lock={node.lock_ref} hits={node.hit_count}"
            )
        return "\n".join(lines)


def _common_pages(tokens: bytes, raw: bytes, at: int, stride: int, extra: int) -> int:
    """Whole pages on which a node and the key from byte `at` agree; at least the one that found the node."""
    mine = np.frombuffer(tokens, np.int32)
    theirs = np.frombuffer(raw, np.int32, offset=at)
    n = min(len(mine), len(theirs))
    differs = np.flatnonzero(mine[:n] != theirs[:n])
    same = int(differs[0]) if len(differs) else n
    return (same * TOKEN_BYTES - extra) // stride
