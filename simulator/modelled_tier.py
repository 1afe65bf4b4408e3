"""ModelledTier: the pages that one modelled worker keeps in host memory, or in storage.

The least recently used page leaves first. Pages are touched from the end of a path to its root, so that a
page is never older than those below it. Host memory is written through: what is computed on the device is in
host memory, too, as long as there is room. What leaves host memory goes to storage.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class ModelledTier:
    """A bounded set of pages, named by hashes that are chained over everything before them."""

    def __init__(
        self,
        capacity: int,
        stored: Callable[[list[int]], None],
        removed: Callable[[list[int]], None],
        below: ModelledTier | None = None,
    ) -> None:
        """`capacity` is in pages. `stored` and `removed` are called with those that enter and leave. What
        leaves goes to `below`."""
        self._capacity = capacity
        self._stored = stored
        self._removed = removed
        self._below = below
        self._pages: OrderedDict[int, None] = OrderedDict()  # oldest first

    def __contains__(self, page: int) -> bool:
        return page in self._pages

    def pages(self) -> set[int]:
        """All pages here."""
        return set(self._pages)

    def touch(self, path: list[int]) -> None:
        """These pages are used, from a prompt's first page on. Those that are not here are ignored."""
        for page in reversed(path):
            if page in self._pages:
                self._pages.move_to_end(page)

    def put(self, path: list[int]) -> None:
        """Keep these pages, from a prompt's first page on: as many of the first ones as there is room for."""
        self._keep(path[: self._capacity])

    def _keep(self, path: list[int]) -> None:
        pages, new = self._pages, []
        for page in reversed(path):
            if page in pages:
                pages.move_to_end(page)
            else:
                pages[page] = None
                new.append(page)
        gone = [pages.popitem(last=False)[0] for _ in range(len(pages) - self._capacity)]
        if new:
            self._stored(new)
        if gone:
            self._removed(gone)
            if self._below is not None:
                self._below._take(gone)

    def _take(self, gone: list[int]) -> None:
        """Pages that left the tier above, oldest first. Their prefixes are there, or here and younger."""
        self._keep(gone[::-1][: self._capacity])
