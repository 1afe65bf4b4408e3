"""HostCopy: what a node of the tree has on the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]


class HostCopy:
    """Host pages of one node, by group, in the form of the group's component: of full, latent and window
    groups an id per page, of the state group the one slot after the node's last token; 0 where there is none.

    `ids` is empty until the first backup has ended. Pages that are there do not change.
    """

    __slots__ = ("ids", "locks", "moving", "stored", "told_stored")

    def __init__(self, ids: dict[str, Ids] | None = None) -> None:
        self.ids: dict[str, Ids] = ids or {}
        self.locks = 0  # reads under way: what is here must stay
        self.moving = 0  # backups of this node under way
        self.stored = False  # the storage tier has all that is here, as far as is known
        self.told_stored = False  # events have said that the pages of the primary group are in storage

    def upper_half(self) -> HostCopy:
        """The copy of the upper part of a node that is split, under the same locks. The components divide
        the ids."""
        upper = HostCopy()
        upper.locks, upper.moving = self.locks, self.moving
        upper.stored, upper.told_stored = self.stored, self.told_stored
        return upper

    @property
    def is_empty(self) -> bool:
        """Whether nothing has arrived on the host."""
        return not self.ids
