"""HostParts: what the host tier knows of each KV group.

A group's pages of a path are given as ids in its form: of full, latent and window groups an id for each page
of the path, of a state group the one slot after its end; 0 where there is none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from kvcache.allocator import NO_PAGES, Pages
from kvcache.components.base import TreeComponent
from kvcache.tree_node import TreeNode
from kvcache.window_locks import WindowLocks

_NONE = np.zeros(1, np.int32)


class HostPart(ABC):
    """One group: what it has of a path on the device and on the host, and how its ids are divided."""

    is_by_page: ClassVar[bool] = True

    def __init__(self, component: TreeComponent) -> None:
        self.component = component
        self.name = component.name

    @abstractmethod
    def on_device(self, path: Sequence[TreeNode]) -> Pages:
        """What is on the device. The path need not be resident."""

    def on_host(self, path: Sequence[TreeNode]) -> Pages:
        """What is on the host."""
        return np.concatenate([NO_PAGES, *(self._copied(node) for node in path)])

    def along(self, path: Sequence[TreeNode]) -> Pages:
        """What is on the host, in the form that TreeComponent.valid_lengths takes."""
        return self.on_host(path)

    def _copied(self, node: TreeNode) -> Pages:
        ids = None if node.host is None else node.host.ids.get(self.name)
        return np.zeros(node.num_pages, np.int32) if ids is None else ids

    def needed(self, pages: int) -> slice:
        """The part of the ids of a path of `pages` pages that a match at its end needs."""
        return slice(0, pages)

    def portion(self, ids: Pages, start: int, end: int, pages: int) -> Pages:
        """Of ids for `pages` pages, those for the pages [start, end), a node of their own."""
        del pages
        return ids[start:end].copy()

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """`upper` has just taken the first pages of `lower`: divide the ids of their host copies."""
        assert upper.host is not None, "the upper part has no host copy"
        assert lower.host is not None, "the lower part has no host copy"
        ids = lower.host.ids.get(self.name)
        if ids is not None:
            border = upper.num_pages
            upper.host.ids[self.name], lower.host.ids[self.name] = ids[:border].copy(), ids[border:].copy()

    def pin(self, pages: Pages) -> None:
        """Keep these device pages of a locked path from eviction, where a lock on the path does not."""
        del pages

    def unpin(self, pages: Pages) -> None:
        """Undo one `pin`."""
        del pages


class FullHostPart(HostPart):
    """The primary group."""

    def on_device(self, path: Sequence[TreeNode]) -> Pages:
        """The nodes' page ids."""
        return np.concatenate(
            [NO_PAGES, *(n.value if n.page_ids else np.zeros(n.num_pages, np.int32) for n in path)]
        )


class WindowHostPart(HostPart):
    """A window group: a match needs the last window only, whose pages are locked one by one."""

    def __init__(self, component: TreeComponent, locks: WindowLocks, tail: int) -> None:
        """`tail`: how many pages before a page border a query there sees."""
        super().__init__(component)
        self._locks = locks
        self._tail = tail

    def on_device(self, path: Sequence[TreeNode]) -> Pages:
        """An id for each page, also of nodes that are not resident: they have none."""
        return self.component.gather(path)

    def needed(self, pages: int) -> slice:
        """The window before the end."""
        return slice(max(0, pages - self._tail), pages)

    def pin(self, pages: Pages) -> None:
        """Lock the pages."""
        self._locks.lock(pages)

    def unpin(self, pages: Pages) -> None:
        """Unlock them."""
        self._locks.unlock(pages)


class StateHostPart(HostPart):
    """A state group: one slot, which a lock on the path's end keeps."""

    is_by_page: ClassVar[bool] = False

    def on_device(self, path: Sequence[TreeNode]) -> Pages:
        """The slot of the state after the path."""
        return self.component.gather(path) if path else _NONE

    def on_host(self, path: Sequence[TreeNode]) -> Pages:
        """The host's slot of the state after the path."""
        return self._copied(path[-1]) if path else _NONE

    def along(self, path: Sequence[TreeNode]) -> Pages:
        """A slot for each node."""
        return np.concatenate([NO_PAGES, *(self._copied(node) for node in path)])

    def _copied(self, node: TreeNode) -> Pages:
        return _NONE if node.host is None else node.host.ids.get(self.name, _NONE)

    def needed(self, pages: int) -> slice:
        """The state."""
        del pages
        return slice(0, 1)

    def portion(self, ids: Pages, start: int, end: int, pages: int) -> Pages:
        """The state is that of the last page."""
        del start
        return ids.copy() if end == pages else np.zeros(1, np.int32)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """The state stays at the end, on `lower`."""


def portions(
    parts: Mapping[str, HostPart], ids: Mapping[str, Pages], start: int, end: int, pages: int
) -> dict[str, Pages]:
    """HostPart.portion of each group."""
    return {name: parts[name].portion(of, start, end, pages) for name, of in ids.items()}
