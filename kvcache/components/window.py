"""The window group on the tree: a match is valid where no page of the next query's window is missing.

What is kept and given up is a page, not a node: a tombstone is a 0 in a node's `parts["window"]`, and locks
are counted by page id (WindowLocks). So a split divides an array, a running request lets go of one page at a
time, and of a long node only the part outside every window is evicted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvcache.allocator import NO_PAGES, BaseTokenToKVPoolAllocator, Pages
from kvcache.components.base import Lengths, PartReport, Tally, TreeComponent
from kvcache.components.holdings import GroupHoldings
from kvcache.request import CachedRequest
from kvcache.shares.pages import TenantPages
from kvcache.swa_allocator import SWATokenToKVPoolAllocator
from kvcache.tree_node import TreeNode
from kvcache.window_locks import WindowLocks


class WindowComponent(TreeComponent):
    """Keeps, on every node, an int32 page id of the window group per page, 0 where there is none.

    An offer is a page id for every page of the key, 0 for none.
    """

    name = "window"

    def __init__(
        self,
        allocator: BaseTokenToKVPoolAllocator,
        locks: WindowLocks,
        tail: int,
        tenants: TenantPages | None = None,
    ) -> None:
        """`tail`: how many pages before a page border a query there sees."""
        self.tenants = tenants
        self.evictor = locks.evictor
        self._allocator = allocator
        self._locks = locks
        self._tail = tail

    @staticmethod
    def _part(node: TreeNode) -> Pages:
        part: Pages = node.parts["window"]
        return part

    # -- matching ----------------------------------------------------------------------------------

    def valid_lengths(self, path: Sequence[TreeNode], pages: int, also: Pages = NO_PAGES) -> Lengths:
        """Lengths before which no page of the window is missing."""
        held = self.gather(path)
        if len(also):
            held = held | also
        last_hole = np.maximum.accumulate(np.where(held == 0, np.arange(pages), -1))
        valid = np.ones(pages + 1, bool)
        valid[1:] = last_hole < np.maximum(np.arange(1, pages + 1) - self._tail, 0)
        return valid

    def gather(self, path: Sequence[TreeNode]) -> Pages:
        """A page id per page of the path, 0 where there is none."""
        return np.concatenate([NO_PAGES, *(self._part(node) for node in path)])

    # -- growing -----------------------------------------------------------------------------------

    def leaf_lengths(self, offer: Pages, pages: int) -> Lengths:
        """Lengths whose last page is offered."""
        lengths = np.zeros(pages + 1, bool)
        if len(offer):
            lengths[1:] = offer != 0
        return lengths

    def revive(self, path: Sequence[TreeNode], offer: Pages, is_whole: bool) -> None:
        """Fill tombstones."""
        del is_whole
        offered = np.flatnonzero(offer)
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

    def insert(self, node: TreeNode, start: int, offer: Pages) -> None:
        """Take the node's pages of the offer."""
        node.parts[self.name] = np.zeros(node.num_pages, np.int32)
        theirs = offer[start : start + node.num_pages]
        self._keep(node, np.flatnonzero(theirs), theirs)

    def _keep(self, node: TreeNode, where: npt.NDArray[np.intp], offer: Pages) -> None:
        if len(where):
            self._part(node)[where] = offer[where]
            self._locks.keep(node, offer[where])
            self.count(node, len(where))

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """Divide the array."""
        part, border = self._part(lower), upper.num_pages
        upper.parts[self.name], lower.parts[self.name] = part[:border].copy(), part[border:].copy()
        self._locks.move(upper, part[:border][part[:border] != 0])

    def hand_over(self, copy: TreeNode, kept: TreeNode) -> None:
        """Fill tombstones."""
        theirs, mine = self._part(copy), self._part(kept)
        where = np.flatnonzero((mine == 0) & (theirs != 0)) if kept.is_resident else NO_PAGES
        pages = theirs[where]
        mine[where], theirs[where] = pages, 0
        self._locks.move(kept, pages)
        self.count(copy, -len(pages))
        self.count(kept, len(pages))

    # -- shrinking ---------------------------------------------------------------------------------

    def is_tombstone(self, node: TreeNode) -> bool:
        """The node's last page is missing."""
        return not self._part(node)[-1]

    def may_evict(self, node: TreeNode) -> bool:
        """Some page is kept and not locked."""
        part = self._part(node)
        return bool(((part != 0) & (self._locks.counts[part] == 0)).any())

    def shrink(self, node: TreeNode, wanted: int, is_free_leaf: bool) -> None:
        """Free pages from the front. Those that a match at the end of an unlocked leaf needs stay."""
        part = self._part(node)
        usable = part[: max(0, len(part) - self._tail)] if is_free_leaf else part
        where = np.flatnonzero(usable)
        self._drop(node, where[self._locks.counts[part[where]] == 0][:wanted])

    def free(self, node: TreeNode) -> None:
        """Free all pages of the node."""
        self.evictor.withdraw(node)
        self._drop(node, np.flatnonzero(self._part(node)))

    def _drop(self, node: TreeNode, where: npt.NDArray[np.intp]) -> None:
        part = self._part(node)
        pages = part[where]
        part[where] = 0
        self._locks.drop(pages)
        self.count(node, -len(pages))
        self._allocator.free_evicted(pages)

    # -- looking -----------------------------------------------------------------------------------

    def evictable(self) -> int:
        """Pages that no row locks."""
        return self._locks.kept_pages - self._locks.locked_pages

    def protected(self) -> int:
        """Pages that a row locks."""
        return self._locks.locked_pages

    def tally(self, nodes: Sequence[TreeNode], tally: Tally) -> None:
        """Every locked page lies on a locked node."""
        locks = self._locks
        for node in nodes:
            part = self._part(node)
            pages = part[part != 0]
            locked = int(np.count_nonzero(locks.counts[pages]))
            assert len(part) == node.num_pages, "not one window page id per page"
            assert all(owner is node for owner in locks.owner[pages]), "a window page's node is another"
            assert node.lock_ref or not locked, "a locked window page on an unlocked node"
            tally.kept += len(pages)
            tally.locked += locked

    def report(self, node: TreeNode) -> PartReport:
        """How many pages are kept, and how many of them are locked."""
        part = self._part(node)
        held, locked = int(np.count_nonzero(part)), int(np.count_nonzero(self._locks.counts[part]))
        return PartReport(held, f"window={held}" + (f" ({locked} locked)" if locked else ""))


class WindowHoldings(GroupHoldings):
    """The window pages of requests: their rows in the SWATokenToKVPoolAllocator."""

    name = "window"

    def __init__(self, swa: SWATokenToKVPoolAllocator) -> None:
        self._swa = swa

    def insertable(self, req: CachedRequest, length: int) -> int:
        """As far as the row has pages, if it still has a window of them: else nothing could continue."""
        swa, row = self._swa, _row(req)
        pages = min(length // swa.page_size, int(swa.end[row]))
        return pages * swa.page_size if swa.needed_from(pages * swa.page_size) >= swa.first[row] else 0

    def offer(self, req: CachedRequest, length: int, ends: bool) -> Pages:
        """The row's own pages."""
        del ends
        return self._swa.offered(_row(req), length // self._swa.page_size)

    def adopt(self, req: CachedRequest, cached: Pages) -> None:
        """The row locks the tree's pages; its duplicates of them are freed."""
        self._swa.allocator.free_page_ids(self._swa.adopt(_row(req), cached))

    def release(self, req: CachedRequest) -> None:
        """Free the row's own pages and unlock the tree's."""
        self._swa.allocator.free_page_ids(self._swa.release(_row(req)))


def _row(req: CachedRequest) -> int:
    assert req.req_pool_idx is not None, "the request has no row"
    return req.req_pool_idx
