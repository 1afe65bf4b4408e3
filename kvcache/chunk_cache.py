"""ChunkCache: no prefix caching. A request keeps its own pages until it ends, or they leave its window."""

from __future__ import annotations

import numpy as np

from kvcache.base_prefix_cache import NO_MATCH, BasePrefixCache, MatchResult
from kvcache.radix_key import RadixKey
from kvcache.request import CachedRequest
from kvcache.tree_node import TreeNode


class ChunkCache(BasePrefixCache):
    """Matches nothing and keeps nothing: its tree has no components and stays empty."""

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
        req.prefix_indices = self._row_slots(req, 0, req.kv_committed_len).astype(np.int64)

    def cache_finished_req(self, req: CachedRequest, is_insert: bool = True) -> None:
        """Free all its pages."""
        del is_insert
        self._release(req, 0)
