"""WindowComponent: a match is valid where every page is there that the next query's window covers.

What is kept and given up is a page, not a node: a tombstone is a 0 in a node's `parts["window"]`, and locks
are counted by page id (WindowLocks). So a split divides an array, a running request lets go of one page at a
time, and of a long node only the part outside every window need go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.allocator import Pages
from kvcache.base_prefix_cache import NO_PAGES, MatchResult
from kvcache.components.base import Lengths, TreeComponent
from kvcache.eviction import Evictor
from kvcache.request import CachedRequest
from kvcache.swa_allocator import SWATokenToKVPoolAllocator
from kvcache.tree_node import TreeNode


class WindowComponent(TreeComponent):
    """Keeps, on every node, an int32 page id of the window group per page; sizes are in pages."""

    name = "window"

    def __init__(self, swa: SWATokenToKVPoolAllocator, policy: str) -> None:
        self.evictor = Evictor(policy, 2)
        self._swa = swa
        self._locks = swa.locks
        self._locks.on_unlocked = self._unlocked
        self._kept = 0
        # The node of each page.
        self._owner: npt.NDArray[np.object_] = np.empty(swa.allocator.num_pages + 1, object)

    @staticmethod
    def _part(node: TreeNode) -> Pages:
        part: Pages = node.parts["window"]
        return part

    # -- matching ----------------------------------------------------------------------------------

    def valid_lengths(self, path: Sequence[TreeNode], pages: int) -> Lengths:
        """Lengths behind which no page of the window is missing."""
        held = np.concatenate([NO_PAGES, *(self._part(node) for node in path)])
        last_hole = np.maximum.accumulate(np.where(held == 0, np.arange(pages), -1))
        valid = np.ones(pages + 1, bool)
        valid[1:] = last_hole < np.maximum(np.arange(1, pages + 1) - self._swa.tail, 0)
        return valid

    def gather(self, path: Sequence[TreeNode]) -> dict[str, Any]:
        """`window_pages`."""
        return {"window_pages": np.concatenate([NO_PAGES, *(self._part(node) for node in path)])}

    # -- growing -----------------------------------------------------------------------------------

    def leaf_lengths(self, offer: Any, pages: int) -> Lengths:
        """Where the last page is offered."""
        lengths = np.zeros(pages + 1, bool)
        if len(offer):
            lengths[1:] = offer != 0
        return lengths

    def revive(self, path: Sequence[TreeNode], offer: Any, is_whole: bool) -> None:
        """Fill tombstones."""
        del is_whole
        offered = np.flatnonzero(offer) if len(offer) else NO_PAGES
        if not len(offered):
            return
        first, last = int(offered[0]), int(offered[-1])
        start = 0
        for node in path:
            end = start + node.num_pages
            if first < end and start <= last:
                mine, theirs = self._part(node), offer[start:end]
                self._keep(node, np.flatnonzero((mine == 0) & (theirs != 0)), theirs)
            start = end

    def insert(self, node: TreeNode, start: int, offer: Any) -> None:
        """See the base."""
        node.parts[self.name] = np.zeros(node.num_pages, np.int32)
        theirs = offer[start : start + node.num_pages]
        self._keep(node, np.flatnonzero(theirs), theirs)

    def _keep(self, node: TreeNode, where: npt.NDArray[np.intp], offer: Pages) -> None:
        if len(where):
            self._part(node)[where] = offer[where]
            self._owner[offer[where]] = node
            self._kept += len(where)
            self.evictor.offer(node)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """Divide the array."""
        part, border = self._part(lower), upper.num_pages
        upper.parts[self.name], lower.parts[self.name] = part[:border].copy(), part[border:].copy()
        moved = part[:border][part[:border] != 0]
        if len(moved):
            self._owner[moved] = upper
            self.evictor.offer(upper)

    # -- shrinking ---------------------------------------------------------------------------------

    def _unlocked(self, pages: Pages) -> None:
        """Nobody locks these any more."""
        for node in self._owner[pages]:
            self.evictor.offer(node)

    def is_tombstone(self, node: TreeNode) -> bool:
        """Its last page is not kept."""
        return not self._part(node)[-1]

    def may_evict(self, node: TreeNode) -> bool:
        """Some page is kept and not locked."""
        part = self._part(node)
        return bool(((part != 0) & (self._locks.counts[part] == 0)).any())

    def shrink(self, node: TreeNode, wanted: int, is_free_leaf: bool) -> None:
        """Front pages first. Those that a match at the end of an unlocked leaf needs stay."""
        part = self._part(node)
        usable = part[: max(0, len(part) - self._swa.tail)] if is_free_leaf else part
        where = np.flatnonzero(usable)
        self._drop(node, where[self._locks.counts[part[where]] == 0][:wanted])

    def free(self, node: TreeNode) -> None:
        """All its pages."""
        self.evictor.withdraw(node)
        where = np.flatnonzero(self._part(node))
        assert not self._locks.counts[self._part(node)[where]].any(), (
            "a locked window page on an unlocked node"
        )
        self._drop(node, where)

    def _drop(self, node: TreeNode, where: npt.NDArray[np.intp]) -> None:
        part = self._part(node)
        pages = part[where]
        part[where] = 0
        self._owner[pages] = None
        self._kept -= len(pages)
        self._swa.allocator.free_now(pages)

    def evictable_size(self) -> int:
        """Pages kept that nobody locks."""
        return self._kept - self._locks.locked_pages

    # -- requests ----------------------------------------------------------------------------------

    def insertable(self, req: CachedRequest, length: int) -> int:
        """As far as the row has pages, if a window of them is still there: else none could continue."""
        assert req.req_pool_idx is not None, "the request has no row"
        row, page_size = req.req_pool_idx, self._swa.page_size
        pages = min(length // page_size, int(self._swa.end[row]))
        return pages * page_size if self._swa.needed_from(pages * page_size) >= self._swa.first[row] else 0

    def offer(self, req: CachedRequest, length: int, ends: bool) -> Any:
        """The row's own pages."""
        del ends
        assert req.req_pool_idx is not None, "the request has no row"
        return self._swa.offered(req.req_pool_idx, length // self._swa.page_size)

    def adopt(self, req: CachedRequest, cached: MatchResult) -> None:
        """The row locks the tree's pages; duplicates are freed."""
        assert req.req_pool_idx is not None, "the request has no row"
        self._swa.allocator.free_page_ids(self._swa.adopt(req.req_pool_idx, cached.window_pages))

    # -- looking -----------------------------------------------------------------------------------

    def check(self, nodes: Sequence[TreeNode]) -> None:
        """As the base says; and every locked page lies on a locked node."""
        locked = self._locks.counts != 0
        seen = 0
        for node in nodes:
            pages = self._part(node)[self._part(node) != 0]
            assert len(self._part(node)) == node.num_pages, "not one window page id per page"
            assert all(owner is node for owner in self._owner[pages]), "a window page's node is another"
            assert node.lock_ref or not locked[pages].any(), "a locked window page on an unlocked node"
            seen += int(locked[pages].sum())
        assert self._kept == len(self.all_pages(nodes)), "window pages kept are miscounted"
        assert seen == self._locks.locked_pages == int(locked.sum()), "locked window pages are miscounted"

    def all_pages(self, nodes: Iterable[TreeNode]) -> Pages:
        """Every page id kept."""
        pages = np.concatenate([NO_PAGES, *(self._part(node) for node in nodes)])
        kept: Pages = pages[pages != 0]
        return kept

    def held(self, node: TreeNode) -> int:
        """Pages kept."""
        return int(np.count_nonzero(self._part(node)))

    def describe(self, node: TreeNode) -> str:
        """Pages kept, and how many of them are locked."""
        locked = int(np.count_nonzero(self._locks.counts[self._part(node)]))
        return f"window={self.held(node)}" + (f" ({locked} locked)" if locked else "")
