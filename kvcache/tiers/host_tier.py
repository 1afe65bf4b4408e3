"""HostTier: which nodes have a copy on the host, and which copy gives way when the host is full.

    on the device          a child only below a parent on the device; evicted leaf first
    on both                its device pages are given up without a copy
    on the host alone      its children are, too; removed from the tree when the host gives it up

Only what no node below has a copy of gives way, in policy order. Of the window and state groups a part may
give way alone, as on the device. A node may leave the tree while its copy is read: the pages stay until then.
All methods are called on the tree's thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from kvcache.allocator import NO_PAGES, Pages
from kvcache.balance import Balance
from kvcache.eviction import Evictor
from kvcache.host_copy import HostCopy
from kvcache.observer import StorageMedium, TreeObserver
from kvcache.tiers.backlog import StorageBacklog
from kvcache.tiers.copier import Copier, nonzero
from kvcache.tiers.host_parts import HostPart
from kvcache.tiers.host_pool import HostPool
from kvcache.tree_node import TreeNode

_FIRST_BIT = 8  # of TreeNode.offers; the device's evictors have those below
_FALLS = {"mru": "lru"}  # an evictor is told of uses where keys fall, and this one is not


@dataclass(slots=True)
class WrittenBack:
    """Pages of the primary group, and bytes, that were copied while an eviction waited."""

    pages: int = 0
    bytes: int = 0


class HostTier:
    """Implements LowerTier."""

    def __init__(
        self,
        pool: HostPool,
        parts: Sequence[HostPart],
        observers: Sequence[TreeObserver],
        page_size: int,
        policy: str,
        write_back: Copier | None,
        backlog: StorageBacklog | None,
    ) -> None:
        """`write_back` copies what would leave the device without a copy; None: that is lost. `backlog`: of
        the storage, if there is one."""
        self.pool = pool
        self.evicted_pages: Counter[str] = Counter()  # since the start, by group
        self.written_back = WrittenBack()
        self.parts = {part.name: part for part in parts}  # the primary group's first
        self._primary = parts[0].name
        self._leaving: set[TreeNode] = set()  # not in the tree; their copies go when they are read no more
        self._observers = tuple(observers)
        self._page_size = page_size
        self._write_back = write_back
        self._backlog = backlog
        policy = _FALLS.get(policy, policy)
        self._evictors = {c.name: Evictor(policy, _FIRST_BIT << i) for i, c in enumerate(parts)}
        for evictor in self._evictors.values():
            evictor.expect_copies()

    # -- what the tree asks ------------------------------------------------------------------------

    def keeps(self, node: TreeNode) -> bool:
        """See LowerTier."""
        if self._write_back is not None:
            self._copy_now(self._write_back, node)
        return node.host is not None and self._primary in node.host.ids

    def shrinking(self, node: TreeNode) -> None:
        """See LowerTier."""
        if self._write_back is not None:
            self._copy_now(self._write_back, node)

    def divided(self, upper: TreeNode, lower: TreeNode) -> None:
        """See LowerTier."""
        for part in self.parts.values():
            part.split(upper, lower)
        self._offer(upper)
        if self._backlog is not None:
            self._backlog.divided(upper, lower)

    def held(self, path: Sequence[TreeNode]) -> Mapping[str, Pages]:
        """See LowerTier."""
        return {name: part.along(path) for name, part in self.parts.items()}

    def renaming(self, node: TreeNode) -> None:
        """See LowerTier."""
        if node.host is not None:
            self.not_stored(node)
            if self._backlog is not None:
                self._backlog.add(node)

    def withdrawing(self, node: TreeNode) -> None:
        """See LowerTier."""
        if node.host is not None:
            self.not_stored(node)
        if self._backlog is not None:
            self._backlog.drop(node)
            if not node.tenant:
                self._backlog.withdraw(node.page_digests(self._page_size))

    # -- taking ------------------------------------------------------------------------------------

    def alloc(self, wanted: Mapping[str, int]) -> dict[str, Pages] | None:
        """Host pages of each group; copies give way when too few are free. All or nothing."""
        for group, n in wanted.items():
            self._make_room(group, n)
        return self.pool.alloc(wanted)

    def _make_room(self, group: str, wanted: int) -> None:
        evictor = self._evictors[group]
        may_go = _is_last_copy if group == self._primary else _is_unread
        while self.pool.short(group, wanted):
            node = evictor.pop(may_go)
            if node is None:
                return
            if group == self._primary:
                self.give_up(node)
            else:
                assert node.host is not None, "a node on offer has a copy"
                ids = node.host.ids.pop(group)
                self.evicted_pages[group] += int(np.count_nonzero(ids))
                self.pool.free({group: ids})
                node.host.stored = False

    def give_up(self, node: TreeNode) -> None:
        """See LowerTier."""
        parent = node.parent
        assert parent is not None, "the root has no copy"
        assert node.host is not None, "it has no copy to give up"
        assert not node.host.locks, "a host copy gives way while it is read"
        for group, ids in node.host.ids.items():
            self.evicted_pages[group] += int(np.count_nonzero(ids))
        self.dropped(node)
        if not node.is_resident:
            del parent.children[node.child_key(self._page_size)]

    def clear(self) -> int:
        """Give up every copy, but those that a move reads or writes and those above them. Returns how many
        pages of the primary group these were."""
        freed = 0
        while (node := self._evictors[self._primary].pop(_is_last_copy)) is not None:
            assert node.host is not None, "a node on offer has a copy"
            freed += int(np.count_nonzero(node.host.ids[self._primary]))
            self.give_up(node)
        return freed

    # -- copies ------------------------------------------------------------------------------------

    def landed(self, node: TreeNode, ids: Mapping[str, Pages], is_stored: bool = False) -> None:
        """These pages of `node` are on the host now, where it had none. `is_stored`: they come from
        storage."""
        copy = node.host
        assert copy is not None, "the node's copy was dropped while it was written"
        is_new = copy.is_empty
        for group, arrived in ids.items():
            if arrived.any():
                had = copy.ids.get(group)
                copy.ids[group] = arrived if had is None else had | arrived
        self._offer(node)
        if is_new and not copy.is_empty:
            for observer in self._observers:
                observer.stored(node, StorageMedium.CPU)
        if is_stored and is_new:
            self.stored(node)
        elif not is_stored:
            copy.stored = False
            if self._backlog is not None:
                self._backlog.add(node)

    def stored(self, node: TreeNode) -> None:
        """Storage has all that the node has on the host."""
        assert node.host is not None, "the node has no copy"
        if node in self._leaving:
            return
        node.host.stored = True
        if not node.host.told_stored:
            node.host.told_stored = True
            for observer in self._observers:
                observer.stored(node, StorageMedium.STORAGE)

    def not_stored(self, node: TreeNode) -> None:
        """Storage has nothing of the node, or what it has is not known any more once the copy has gone."""
        assert node.host is not None, "the node has no copy"
        node.host.stored = False
        if node.host.told_stored:
            node.host.told_stored = False
            for observer in self._observers:
                observer.removed(node, StorageMedium.STORAGE)

    def unlock(self, node: TreeNode) -> None:
        """Undo one lock of the node's copy. It is gone after the last one if the node has left the tree."""
        assert node.host is not None, "the node has no copy"
        node.host.locks -= 1
        assert node.host.locks >= 0, "a host copy is unlocked more often than locked"
        if node not in self._leaving:
            self._offer(node)
        elif not node.host.locks:
            self._leaving.remove(node)
            self.pool.free(node.host.ids)
            node.host = None

    def forget(self, node: TreeNode) -> None:
        """A backup of the node has failed, or has found no room: it keeps the copy that it had, if any."""
        if node.host is not None and node.host.is_empty and not node.host.moving:
            node.host = None
            assert node.parent is not None, "the root has no copy"
            self._offer(node.parent)
        self._offer(node)

    def _offer(self, node: TreeNode) -> None:
        if _is_unread(node):
            for group, evictor in self._evictors.items():
                if node.host is not None and group in node.host.ids:
                    evictor.offer(node)

    def dropped(self, node: TreeNode) -> None:
        """See LowerTier."""
        copy = node.host
        if copy is None:
            return
        assert not copy.moving, "a host copy is dropped while it is written"
        if self._backlog is not None:
            self._backlog.drop(node)
        self.not_stored(node)
        for observer in self._observers if not copy.is_empty else ():
            observer.removed(node, StorageMedium.CPU)
        for evictor in self._evictors.values():
            evictor.withdraw(node)
        if node.parent is not None:  # its copy may be the last of its path now
            self._offer(node.parent)
        if copy.locks:  # storage reads it; what a load or a send reads stays in the tree
            self._leaving.add(node)
            return
        self.pool.free(copy.ids)
        node.host = None

    def _copy_now(self, copier: Copier, node: TreeNode) -> None:
        """Write back: copy what the node has on the device alone, while its eviction waits. Nothing is copied
        when the host is full."""
        held = missing_on_host(self.parts.values(), node)
        device = {group: nonzero(ids) for group, ids in held.items()}
        if not any(map(len, device.values())):
            return
        copy = node.host = node.host or HostCopy()
        copy.locks += 1
        host = self.alloc({group: len(ids) for group, ids in device.items()})
        copy.locks -= 1
        if host is None:
            self.forget(node)
            return
        self.written_back.pages += len(device[self._primary])
        self.written_back.bytes += copier.to_host(device, host)
        self.landed(node, {group: scattered(held[group], ids) for group, ids in host.items()})

    # -- balance -----------------------------------------------------------------------------------

    def check(
        self, nodes: Iterable[TreeNode], held: Sequence[Mapping[str, Pages]], is_idle: bool
    ) -> Generator[None, None, None]:
        """Assert that every host page is free, on one node, or in one of `held`, which moves have. `is_idle`:
        nothing moves or waits, so that no copy may be locked."""
        balances = {
            group: Balance(f"host {group}", arena.num_pages, f"host page of {group}")
            for group, arena in self.pool.arenas.items()
        }
        for group, balance in balances.items():
            allocator = self.pool.arenas[group].allocator
            for run in allocator.free_runs():
                yield from balance.add("free", run)
            moving = [nonzero(ids[group]) for ids in held if group in ids]
            yield from balance.add("moving", np.concatenate([NO_PAGES, *moving]))
        for node in chain(nodes, self._leaving):
            if node.host is not None:
                assert not is_idle or _is_unread(node), "a host copy is locked for nothing"
                for group, ids in node.host.ids.items():
                    yield from balances[group].add("cached", nonzero(ids))
        for balance in balances.values():
            yield from balance.check()


def _is_unread(node: TreeNode) -> bool:
    """Whether the node has a copy that no move reads or writes."""
    return node.host is not None and not node.host.locks and not node.host.moving


def _is_last_copy(node: TreeNode) -> bool:
    """Whether the node may lose its copy: nothing reads it, and no child has one."""
    return _is_unread(node) and not any(child.host is not None for child in node.children.values())


def missing_on_host(parts: Iterable[HostPart], node: TreeNode) -> dict[str, Pages]:
    """By group, what a node has on the device alone, in the groups' forms; 0 elsewhere."""
    return {
        part.name: np.where(part.on_host([node]) == 0, part.on_device([node]), 0).astype(np.int32)
        for part in parts
    }


def scattered(places: Pages, ids: Pages) -> Pages:
    """`ids` where `places` is not 0, and 0 elsewhere."""
    out = np.zeros(len(places), np.int32)
    out[np.flatnonzero(places)] = ids
    return out
