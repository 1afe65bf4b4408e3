"""LoadBacks: what matches have on the host is loaded to the device, before their requests are admitted.

    bring_back    for the request that is next: it waits, and what others have loaded gives way to it
    bring_ahead   for one whose turn comes later, meanwhile, in memory that nobody needs before

All of what a match lacks is loaded, or nothing. What is read is locked, and what is written belongs to the
load, until the mover is done: `held` names it for the balance. Then it is in the tree, locked until the
request has locks of its own. A node may be split meanwhile; its last part keeps its identity, so a load ends
on the path that then ends where its path ends. No page is loaded twice at a time.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvcache.allocator import NO_PAGES, Pages
from kvcache.base_prefix_cache import MatchResult
from kvcache.group_allocator import GroupAllocator
from kvcache.radix_tree import RadixTree, resident_part
from kvcache.tiers.config import TierConfig
from kvcache.tiers.copier import Copier, nonzero
from kvcache.tiers.host_parts import portions
from kvcache.tiers.host_tier import HostTier, scattered
from kvcache.tiers.mover import Failed, WorkQueue
from kvcache.tree_node import TreeNode

_AHEAD_SHARE = 2  # with loads ahead, loads have at most one page in so many of the device's


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
    pages: int = 0  # of the primary group that are brought
    path_pages: int = 0
    is_done: bool = False
    is_released: bool = False
    is_forgotten: bool = False

    def brings_some_of(self, host: Mapping[str, Pages]) -> bool:
        """Whether some of these host pages are on their way to the device."""
        mine = self.host
        return not self.is_done and any(np.isin(nonzero(ids), mine[name]).any() for name, ids in host.items())


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


class LoadBacks:
    """One worker's. All methods are called on the tree's thread."""

    def __init__(
        self,
        config: TierConfig,
        tree: RadixTree,
        host: HostTier,
        groups: Mapping[str, GroupAllocator],
        copier: Copier,
        mover: WorkQueue,
        counts: MoveCounts,
    ) -> None:
        self._config = config
        self._tree = tree
        self._host = host
        self._groups = groups
        self._copier = copier
        self._mover = mover
        self._parts = host.parts
        self._primary = tree.components[0].name
        self._counts = counts
        self._loads: dict[Hashable, LoadBack] = {}  # by owner, until they are released and done
        self._failed: set[Hashable] = set()  # owners whose loads have failed, until they are forgotten
        self._most_ahead = groups[self._primary].allocator.num_pages // _AHEAD_SHARE

    def wants(self, match: MatchResult) -> bool:
        """Whether more of a match is on the host than is computed as quickly."""
        return match.host_hit_length >= max(1, self._config.load_back_threshold)

    def bring_back(self, owner: Hashable, match: MatchResult, fits: bool) -> bool:
        """Load what `match` has on the host, once for each owner: what cannot be loaded is computed. Whether
        to wait: match again then.

        `fits`: there is memory for all that the owner needs. Loads of other owners give way to this one. What
        was loaded is locked until `release` or `make_room`.
        """
        load = self._loads.get(owner)
        if load is not None:
            return not load.is_done
        last = match.last_host_node
        if not fits or last is None or owner in self._failed:
            return False
        waits = self._load_back(owner, last) or (self.make_room() and self._load_back(owner, last))
        return waits or self.loading > 0  # the others' pages may do

    def bring_ahead(self, owner: Hashable, match: MatchResult) -> None:
        """Load for an owner whose turn comes later; not while a part of it is on its way for someone else,
        nor when loads would hold too much of the device."""
        held = sum(load.pages for load in self._loads.values())
        more, last = match.host_hit_length // self._tree.page_size, match.last_host_node
        known = owner in self._loads or owner in self._failed
        if not known and last is not None and held + more <= self._most_ahead:
            self._load_back(owner, last)

    def release(self, owner: Hashable) -> None:
        """The owner has locked what was loaded for it, or does not want it any more."""
        load = self._loads.get(owner)
        if load is None:
            return
        load.is_released = True
        if load.is_done:
            self._let_go(load)

    def forget(self, owner: Hashable) -> None:
        """The owner waits for nothing any more."""
        self._failed.discard(owner)
        if (load := self._loads.get(owner)) is not None:
            load.is_forgotten = True
            self.release(owner)

    def make_room(self) -> bool:
        """Memory is short: what was loaded for owners that do not use it yet may be evicted. Whether there
        was any. What is still under way follows when it is done."""
        done = any(load.is_done for load in self._loads.values())
        for owner in list(self._loads):
            self.release(owner)
        return done

    def loaded_pages(self, owner: Hashable) -> int:
        """Pages, from the first one on, that are not free because of the owner's load; 0 without one."""
        load = self._loads.get(owner)
        return 0 if load is None else load.path_pages

    def _load_back(self, owner: Hashable, last: TreeNode) -> bool:
        """Begin a load, unless some of its pages are on their way already. False, and nothing is, if there
        are too few pages for it."""
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
        if any(load.brings_some_of(host) for load in self._loads.values()):
            return True
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
        load.pages, load.path_pages = int(np.count_nonzero(device[self._primary])), pages
        self._loads[owner] = load
        self._counts.loads += 1
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
            self._counts.failed_loads += 1
            self._free(load.device)
            self._unlock_anchor(load)
            del self._loads[load.owner]
            if not load.is_forgotten:
                self._failed.add(load.owner)
            return
        self._counts.to_device_bytes += result
        self._counts.to_device_pages += load.pages
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
        del self._loads[load.owner]

    # -- looking -----------------------------------------------------------------------------------

    @property
    def loading(self) -> int:
        """How many loads are under way."""
        return sum(not load.is_done for load in self._loads.values())

    def held(self) -> dict[str, Pages]:
        """By group: device pages that loads are writing to."""
        running = [load.device for load in self._loads.values() if not load.is_done]
        return {
            name: nonzero(np.concatenate([NO_PAGES, *(device[name] for device in running)]))
            for name in self._parts
        }
