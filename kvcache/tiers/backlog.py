"""StorageBacklog: what the host tier has for the storage, until the storage tier takes it."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict

from kvcache.tree_node import TreeNode
from wire.page_hash import PageDigest

_FIRST_DELAY_S, _MOST_DELAY_S = 30.0, 480.0  # before another try, which doubles with each that fails
_MOST_AGAIN = 1 << 16  # pages that storage could not forget and that wait for another try

log = logging.getLogger(__name__)


class StorageBacklog:
    """There is one where there is a storage. All methods are called on the tree's thread."""

    def __init__(self) -> None:
        # Parents first, as they came, each with how long it was put off before.
        self._new: OrderedDict[TreeNode, float] = OrderedDict()
        # Those that could not be stored: when they are tried again, and for how long they were put off.
        self._later: dict[TreeNode, tuple[float, float]] = {}
        self._due_at = math.inf  # nothing of those is tried before
        self._withdrawn: list[PageDigest] = []

    def __len__(self) -> int:
        """How many nodes are to be stored."""
        return len(self._new) + len(self._later)

    def __contains__(self, node: TreeNode) -> bool:
        """Whether the node is to be stored."""
        return node in self._new or node in self._later

    def add(self, node: TreeNode) -> None:
        """The host has something of `node` that storage lacks, perhaps under this owner's name alone."""
        self.drop(node)
        self._new[node] = 0.0

    def put_off(self, node: TreeNode, delay_s: float, now: float) -> None:
        """`node` could not be stored, `delay_s` seconds after the try before; 0: there was none."""
        delay_s = min(max(2 * delay_s, _FIRST_DELAY_S), _MOST_DELAY_S)
        self._later[node] = now + delay_s, delay_s
        self._due_at = min(self._due_at, now + delay_s)

    def resume(self, now: float) -> None:
        """What has been put off for long enough is to be stored."""
        if now < self._due_at:
            return
        due = [node for node, (at, _) in self._later.items() if at <= now]
        for node in due:
            way = []  # parents first: the upper part of a node that was divided meanwhile comes after it here
            above: TreeNode | None = node
            while above in self._later and self._later[above][0] <= now:
                way.append(above)
                above = above.parent
            for one in reversed(way):
                self._new[one] = self._later.pop(one)[1]
        self._due_at = min((at for at, _ in self._later.values()), default=math.inf)

    def drop(self, node: TreeNode) -> None:
        """`node` is not to be stored, or not any more."""
        self._new.pop(node, None)
        self._later.pop(node, None)

    def divided(self, upper: TreeNode, lower: TreeNode) -> None:
        """`upper` has just taken the first pages of `lower`."""
        if lower in self._new:
            self.add(upper)
            self._new.move_to_end(upper, last=False)
        elif lower in self._later:
            self._later[upper] = self._later[lower]

    def withdraw(self, pages: list[PageDigest]) -> None:
        """These pages have stopped being public: storage is to forget them under their public names."""
        self._withdrawn += pages

    def withdraw_again(self, pages: list[PageDigest]) -> None:
        """The storage could not forget these pages. Only so many are kept: the latest."""
        room = max(0, _MOST_AGAIN - len(self._withdrawn))
        dropped = max(0, len(pages) - room)
        if dropped:
            log.warning("%d pages that are not public any more stay in storage: it removes nothing", dropped)
        self._withdrawn = pages[dropped:] + self._withdrawn

    def first(self) -> TreeNode | None:
        """What is to be stored next. It stays here, and may have lost its copy."""
        return next(iter(self._new), None)

    def take_all(self) -> list[TreeNode]:
        """Everything that is to be stored. Nothing of it stays here."""
        nodes = [*self._new, *self._later]
        self._new.clear()
        self._later.clear()
        return nodes

    def delay_s(self, node: TreeNode) -> float:
        """For how long what is to be stored was put off before."""
        return self._new[node]

    def take_withdrawn(self) -> list[PageDigest]:
        """What was withdrawn since the last call."""
        withdrawn, self._withdrawn = self._withdrawn, []
        return withdrawn
