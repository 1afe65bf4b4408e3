"""TierMoves: backups to the host and loads from there, between their start and their end.

    consider   after an insert or a hit: nodes that should have a copy get one   device -> host
    bring_back before an admission: what a match lacks on the device is loaded   host -> device

What the mover has done enters the tree when its owner takes it (Tiers.poll).
The engine loop never waits for a copy. What is read is locked, and what is written belongs to the move, until
the mover is done: `held` names it for the balance. A node may be split meanwhile; its last part keeps its
identity, so a move ends on the nodes that then end where its node ends.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvcache.allocator import Pages
from kvcache.base_prefix_cache import MatchResult
from kvcache.group_allocator import GroupAllocator
from kvcache.host_copy import HostCopy
from kvcache.radix_tree import RadixTree, resident_part
from kvcache.tiers.config import TierConfig
from kvcache.tiers.copier import Copier, nonzero
from kvcache.tiers.host_parts import portions
from kvcache.tiers.host_tier import HostTier, missing_on_host, scattered
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


@dataclass(slots=True, eq=False)
class LoadBack:
    """What a match that ends at `last` lacks on the device, on its way there. The forms are those of the
    groups for the path of `last`.

    The path is locked from `anchor`, its last node that was resident, on; once it is done from `last` on,
    until `release`.
    """

    owner: Hashable
    last: TreeNode
    anchor: TreeNode | None
    device: dict[str, Pages]
    host: dict[str, Pages]
    pinned: dict[str, Pages]
    locked: list[tuple[int, int]]  # pages of the path, from and to, whose host copies are locked
    is_done: bool = False
    is_released: bool = False


@dataclass(slots=True)
class MoveCounts:
    """Since the start."""

    to_host_pages: int = 0  # of the primary group
    to_host_bytes: int = 0
    failed_backups: int = 0
    loads: int = 0
    to_device_pages: int = 0
    to_device_bytes: int = 0
    failed_loads: int = 0


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
        self._config = config
        self._tree = tree
        self._host = host
        self._groups = groups
        self._copier = copier
        self._mover = mover
        self._parts = host.parts
        self._primary = tree.components[0].name
        self._backups: set[Backup] = set()
        self._in_flight = 0  # pages of the primary group
        self._postponed: dict[TreeNode, bool] = {}  # ends of paths to consider again; whether they are found
        self._most_in_flight = groups[self._primary].allocator.num_pages // _IN_FLIGHT_SHARE
        self._load: LoadBack | None = None

    # -- device to host ----------------------------------------------------------------------------

    def consider(self, path: Sequence[TreeNode], is_found: bool = False) -> None:
        """`path` was inserted, or with `is_found` a new request has found it: back up what the policy wants
        on the host. Parents come first, and after one without a copy there is none.

        A request inserts the same path several times; only another one that finds it is a second use.
        """
        policy = self._config.write_policy
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
        postponed, self._postponed = self._postponed, {}
        for node, is_found in postponed.items():
            self.consider(node.path(), is_found)

    # -- host to device ----------------------------------------------------------------------------

    def wants(self, match: MatchResult) -> bool:
        """Whether more of a match is on the host than is computed as quickly."""
        return match.host_hit_length >= max(1, self._config.load_back_threshold)

    def bring_back(self, owner: Hashable, match: MatchResult, fits: bool) -> bool:
        """Load what `match` has on the host, once for each owner. Whether to wait: match again then.

        `fits`: there is memory for all that the owner needs. One load is under way at a time, and what one
        has loaded is locked until `release`, or until another owner's load begins or needs the room.
        """
        load = self._load
        if load is not None and not load.is_done:
            return True
        if load is not None and load.owner == owner:
            return False
        if not fits or match.last_host_node is None:
            return False
        if load is not None:
            self.release(load.owner)
        return self._load_back(owner, match.last_host_node)

    def release(self, owner: Hashable) -> None:
        """The owner has locked what was loaded for it, or does not want it any more."""
        load = self._load
        if load is None or load.owner != owner:
            return
        load.is_released = True
        if load.is_done:
            self._let_go(load)

    def make_room(self, owner: Hashable) -> bool:
        """`owner` lacks memory: what was loaded for another one is not locked any more. Whether anything
        was."""
        load = self._load
        if load is None or not load.is_done or load.owner == owner:
            return False
        self.release(load.owner)
        return True

    def _load_back(self, owner: Hashable, last: TreeNode) -> bool:
        tree, path = self._tree, last.path()
        pages = sum(node.num_pages for node in path)
        resident, _ = resident_part(path)
        anchor = resident[-1] if resident else None
        host, pinned = {}, {}
        for name, part in self._parts.items():
            held, needed = part.on_device(path), part.needed(pages)
            wanted = np.zeros_like(held)
            wanted[needed] = np.where(held[needed] == 0, part.on_host(path)[needed], 0)
            host[name], pinned[name] = wanted, nonzero(held[needed])
        if anchor is not None:
            tree.lock(anchor)
        for name, part in self._parts.items():
            part.pin(pinned[name])
        locked = self._lock_sources(path, host, pages)
        device = self._alloc(host)
        load = LoadBack(owner, last, anchor, device or {}, host, pinned, locked)
        if device is None:
            self._unlock_sources(load)
            self._unlock_anchor(load)
            return False
        self._load = load
        self.counts.loads += 1
        packed = {name: nonzero(ids) for name, ids in device.items()}
        sources = {name: nonzero(ids) for name, ids in host.items()}
        self._mover.submit(
            "loads", lambda: self._copier.to_device(packed, sources), lambda n: self._loaded(load, n)
        )
        return True

    def _alloc(self, wanted: Mapping[str, Pages]) -> dict[str, Pages] | None:
        """Device pages for the places that are not 0, evicting first; None, and none, if there are too
        few."""
        taken: dict[str, Pages] = {}
        for name, places in wanted.items():
            pages = self._groups[name].alloc(int(np.count_nonzero(places)))
            if pages is None:
                self._free(taken)
                return None
            taken[name] = scattered(places, pages)
        return taken

    def _free(self, device: Mapping[str, Pages]) -> None:
        for name, ids in device.items():
            self._groups[name].allocator.free_page_ids(nonzero(ids))

    def _loaded(self, load: LoadBack, result: int | Failed) -> None:
        load.is_done = True
        self._unlock_sources(load)
        if isinstance(result, Failed):
            self.counts.failed_loads += 1
            self._free(load.device)
            self._unlock_anchor(load)
            load.is_released = True
            self._load = None
            return
        self.counts.to_device_bytes += result
        self.counts.to_device_pages += int(np.count_nonzero(load.device[self._primary]))
        self._enter(load)
        self._tree.lock(load.last)
        path = load.last.path()
        pages = sum(node.num_pages for node in path)
        pinned = {
            name: nonzero(part.on_device(path)[part.needed(pages)]) for name, part in self._parts.items()
        }
        for name, part in self._parts.items():
            part.pin(pinned[name])
        self._unlock_anchor(load)
        load.pinned = pinned
        if load.is_released:
            self._let_go(load)

    def _enter(self, load: LoadBack) -> None:
        """Give the path its pages. Those that it has got otherwise in the meantime are freed again."""
        path, primary = load.last.path(), self._parts[self._primary]
        offered = load.device[self._primary]
        surplus = {self._primary: np.where(primary.on_device(path) != 0, offered, 0)}
        self._tree.restore(path, offered)
        for component in self._tree.others:
            offered = load.device[component.name]
            component.revive(path, offered, is_whole=True)
            now = self._parts[component.name].on_device(path)
            surplus[component.name] = np.where(now != offered, offered, 0)
        self._free(surplus)

    def _lock_sources(
        self, path: Sequence[TreeNode], host: Mapping[str, Pages], pages: int
    ) -> list[tuple[int, int]]:
        """Lock the copies of the nodes of which `host` has pages."""
        locked, start = [], 0
        for node in path:
            end = start + node.num_pages
            if any(ids.any() for ids in portions(self._parts, host, start, end, pages).values()):
                assert node.host is not None, "a node without a copy has pages on the host"
                node.host.locks += 1
                locked.append((start, end))
            start = end
        return locked

    def _unlock_sources(self, load: LoadBack) -> None:
        start = 0
        for node in load.last.path():
            end = start + node.num_pages
            if any(first <= start and end <= stop for first, stop in load.locked):
                self._host.unlock(node)
            start = end

    def _unlock_anchor(self, load: LoadBack) -> None:
        for name, part in self._parts.items():
            part.unpin(load.pinned[name])
        if load.anchor is not None:
            self._tree.unlock(load.anchor)

    def _let_go(self, load: LoadBack) -> None:
        for name, part in self._parts.items():
            part.unpin(load.pinned[name])
        self._tree.unlock(load.last)
        if self._load is load:
            self._load = None

    # -- looking -----------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether nothing moves."""
        return not self._backups and (self._load is None or self._load.is_done)

    def held(self) -> dict[str, Pages]:
        """By group: device pages that a load is writing to."""
        if self._load is None or self._load.is_done:
            return {}
        return {name: nonzero(ids) for name, ids in self._load.device.items()}

    def held_on_host(self) -> Iterator[Mapping[str, Pages]]:
        """Host pages that backups are writing to."""
        return (backup.host for backup in self._backups)
