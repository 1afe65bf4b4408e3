"""ChunkCache: no prefix caching; a request keeps its own pages until it ends, or they leave its window."""

from __future__ import annotations

from kvcache.allocator import Pages, Slots
from kvcache.base_prefix_cache import NO_MATCH, NO_PAGES, BasePrefixCache, MatchResult
from kvcache.radix_key import RadixKey
from kvcache.request import NO_SLOTS, CachedRequest
from kvcache.tree_node import TreeNode


class ChunkCache(BasePrefixCache):
    """Matches nothing and keeps nothing."""

    def match_prefix(self, key: RadixKey) -> MatchResult:
        """Nothing."""
        del key
        return NO_MATCH

    def match_parts(self, key: RadixKey) -> MatchResult:
        """Nothing."""
        del key
        return NO_MATCH

    def inc_lock_ref(self, node: TreeNode | None) -> None:
        """There are no nodes."""
        assert node is None, "a node of another cache"

    def dec_lock_ref(self, node: TreeNode | None) -> None:
        """There are no nodes."""
        assert node is None, "a node of another cache"

    def cache_unfinished_req(self, req: CachedRequest, chunked: bool = False) -> None:
        """The next chunk continues from the request's own pages."""
        del chunked
        req.prefix_indices = self._row_slots(req, 0, req.kv_committed_len)

    def cache_finished_req(self, req: CachedRequest, is_insert: bool = True) -> None:
        """Free all its pages."""
        del is_insert
        self.allocator.free_page_ids(self._row_pages(req, 0, req.kv_allocated_len))
        self._release_parts(req)

    def evict(self, num_tokens: int) -> int:
        """There is nothing to evict."""
        del num_tokens
        return 0

    def reset(self) -> None:
        """There is nothing to free."""

    def evictable_size(self) -> int:
        """Always 0."""
        return 0

    def protected_size(self) -> int:
        """Always 0."""
        return 0

    def check(self) -> None:
        """There is nothing to count."""

    def all_pages(self) -> Pages:
        """None."""
        return NO_PAGES

    def all_values_flatten(self) -> Slots:
        """None."""
        return NO_SLOTS

    def pretty_print(self) -> str:
        """One line."""
        return "prefix caching is off"
