"""WindowLocks: the window pages that the tree keeps, which node each lies on, and which rows lock it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcache.allocator import Pages
from kvcache.eviction import Evictor
from kvcache.shares.evictor import SharedEvictor
from kvcache.shares.pages import TenantPages
from kvcache.tree_node import TreeNode


class WindowLocks:
    """Shared by the tree, which keeps and drops pages, and by the requests' rows, which lock them.

    Locks are counted by page id: a decoding request lets go of one page at a time, and splitting a node
    concerns no lock. A node with a page that no row locks is on offer at `evictor`.
    """

    def __init__(self, num_pages: int, policy: str, tenants: TenantPages | None = None) -> None:
        self.evictor = Evictor(policy, 2) if tenants is None else SharedEvictor(policy, 2, tenants)
        self.counts: npt.NDArray[np.int32] = np.zeros(num_pages + 1, np.int32)
        self.owner: npt.NDArray[np.object_] = np.empty(num_pages + 1, object)  # the node of each page
        self.kept_pages = 0
        self.locked_pages = 0  # pages with at least one lock

    # -- the tree's side ---------------------------------------------------------------------------

    def keep(self, node: TreeNode, pages: Pages) -> None:
        """`pages` are on `node` now."""
        self.owner[pages] = node
        self.kept_pages += len(pages)
        self.evictor.offer(node)

    def move(self, node: TreeNode, pages: Pages) -> None:
        """`pages` are on `node` now, and were on another."""
        if len(pages):
            self.owner[pages] = node
            self.evictor.offer(node)

    def drop(self, pages: Pages) -> None:
        """The tree gives up `pages`; no row locks them."""
        assert not self.counts[pages].any(), "a locked window page is dropped"
        self.owner[pages] = None
        self.kept_pages -= len(pages)

    # -- the rows' side ----------------------------------------------------------------------------

    def lock(self, pages: Pages) -> None:
        """Lock each of `pages` once; they are distinct."""
        assert pages.all(), "page 0 is scratch and never locked"
        self.locked_pages += int(np.count_nonzero(self.counts[pages] == 0))
        self.counts[pages] += 1

    def unlock(self, pages: Pages) -> None:
        """Undo one lock of each of `pages`. A page that several rows unlock occurs once for each."""
        if not len(pages):
            return
        np.subtract.at(self.counts, pages, 1)
        left = self.counts[pages]
        assert left.min() >= 0, "a window page is unlocked more often than locked"
        free = np.unique(pages[left == 0])
        self.locked_pages -= len(free)
        for node in self.owner[free]:
            self.evictor.offer(node)

    def check(self) -> None:
        """Assert that the locked pages are counted rightly."""
        assert self.locked_pages == np.count_nonzero(self.counts), "locked window pages are miscounted"
