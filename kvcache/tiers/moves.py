"""TierMoves: backups to the host and loads from there (loads.py), between their start and their end.

    consider   after an insert or a hit: nodes that should have a copy get one   device -> host
    loads      before an admission: what a match lacks on the device is loaded   host -> device

What the mover has done enters the tree when its owner takes it (Tiers.poll).
The engine loop never waits for a copy. What a backup reads is locked, and what it writes belongs to it, until
the mover is done. A node may be split meanwhile; its last part keeps its identity, so a backup ends on the
nodes that then end where its node ends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvcache.allocator import Pages
from kvcache.group_allocator import GroupAllocator
from kvcache.host_copy import HostCopy
from kvcache.radix_tree import RadixTree
from kvcache.tiers.config import TierConfig
from kvcache.tiers.copier import Copier, nonzero
from kvcache.tiers.host_parts import portions
from kvcache.tiers.host_tier import HostTier, missing_on_host, scattered
from kvcache.tiers.loads import LoadBacks, MoveCounts
from kvcache.tiers.mover import Failed, WorkQueue
from kvcache.tiers.pieces import pieces
from kvcache.tree_node import TreeNode

_IN_FLIGHT_SHARE = 4  # backups lock at most one page in so many of the device's


@dataclass(slots=True, eq=False)
class Backup:
    """Pages of one node on their way to the host, by group, in the groups' forms; 0 where nothing goes."""

    node: TreeNode
    pages: int
    device: dict[str, Pages]
    host: dict[str, Pages]


class TierMoves:
    """One worker's moves between device and host. All methods are called on the tree's thread."""

    def __init__(
        self,
        config: TierConfig,
        tree: RadixTree,
        host: HostTier,
        groups: Mapping[str, GroupAllocator],
        copier: Copier,
        mover: WorkQueue,
    ) -> None:
        self.counts = MoveCounts()
        self.loads = LoadBacks(config, tree, host, groups, copier, mover, self.counts)
        self._policy = config.write_policy
        self._tree = tree
        self._host = host
        self._copier = copier
        self._mover = mover
        self._parts = host.parts
        self._primary = tree.components[0].name
        self._backups: set[Backup] = set()
        self._in_flight = 0  # pages of the primary group
        # Ends of paths to consider again, the oldest first; whether they are found.
        self._postponed: OrderedDict[TreeNode, bool] = OrderedDict()
        self._most_in_flight = groups[self._primary].allocator.num_pages // _IN_FLIGHT_SHARE

    def consider(self, path: Sequence[TreeNode], is_found: bool = False) -> None:
        """`path` was inserted, or with `is_found` a new request has found it: back up what the policy wants
        on the host. Parents come first, and after one without a copy there is none.

        A request inserts the same path several times; only another one that finds it is a second use.
        """
        policy = self._policy
        if policy == "write_back" or (is_found and policy != "write_through_selective"):
            return
        takes_new = is_found or policy == "write_through"
        for node in path:
            if not node.is_resident or (node.host is None and not takes_new):
                return
            if not self._back_up(node):
                self._postponed[path[-1]] = is_found or self._postponed.get(path[-1], False)
                return
            if node.host is None:
                return

    def _back_up(self, node: TreeNode) -> bool:
        """Begin to copy what the node has on the device alone, if the host has room. False, and nothing is
        begun, if too much is in flight."""
        if node.host is not None and node.host.moving:
            return True
        device = missing_on_host(self._parts.values(), node)
        count = int(np.count_nonzero(device[self._primary]))
        if not any(ids.any() for ids in device.values()):
            return True
        if self._in_flight and self._in_flight + count > self._most_in_flight:
            return False
        copy = node.host = node.host or HostCopy()
        copy.moving += 1  # from here on the copies above do not give way
        host = self._host.alloc({name: int(np.count_nonzero(ids)) for name, ids in device.items()})
        if host is None:
            copy.moving -= 1
            self._host.forget(node)
            return True
        self._tree.lock(node)
        for name, part in self._parts.items():
            part.pin(nonzero(device[name]))
        placed = {name: scattered(device[name], ids) for name, ids in host.items()}
        backup = Backup(node, node.num_pages, device, placed)
        self._backups.add(backup)
        self._in_flight += count
        packed = {name: nonzero(ids) for name, ids in device.items()}
        self._mover.submit(
            "backups", lambda: self._copier.to_host(packed, host), lambda n: self._backed_up(backup, n)
        )
        return True

    def _backed_up(self, backup: Backup, result: int | Failed) -> None:
        self._backups.remove(backup)
        self._in_flight -= int(np.count_nonzero(backup.device[self._primary]))
        now = list(pieces(backup.node, backup.pages))
        for node, _, _ in now:
            assert node.host is not None, "a node's copy went while it was written"
            node.host.moving -= 1
        if isinstance(result, Failed):
            self.counts.failed_backups += 1
            self._host.pool.free(backup.host)
            for node, _, _ in now:
                self._host.forget(node)
        else:
            self.counts.to_host_bytes += result
            self.counts.to_host_pages += backup.pages
            for node, start, end in now:
                self._host.landed(node, portions(self._parts, backup.host, start, end, backup.pages))
        for name, part in self._parts.items():
            part.unpin(nonzero(backup.device[name]))
        self._tree.unlock(backup.node)
        self._take_up()

    def _take_up(self) -> None:
        """Consider again what was postponed, the oldest first, as long as not too much is in flight."""
        while self._postponed:
            node, is_found = self._postponed.popitem(last=False)
            self.consider(node.path(), is_found)
            if node in self._postponed:
                self._postponed.move_to_end(node, last=False)
                return

    @property
    def is_idle(self) -> bool:
        """Whether nothing moves."""
        return not self._backups and not self.loads.loading

    def held_on_host(self) -> Iterator[Mapping[str, Pages]]:
        """Host pages that backups are writing to."""
        return (backup.host for backup in self._backups)
