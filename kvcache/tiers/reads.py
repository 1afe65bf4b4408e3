"""TierReads: cached prefixes that are read where they lie, on the device and on the host, without a load.

A read locks what it reads: on the device as a request's lock would, and on the host each copy. Nothing is
allocated. Nodes may be split, loaded or given up by the device meanwhile; the last part of a split node keeps
its identity, so a read ends on the path that then ends where it did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvcache.allocator import NO_PAGES, Pages
from kvcache.radix_key import RadixKey
from kvcache.radix_tree import RadixTree, resident_part
from kvcache.tiers.copier import nonzero
from kvcache.tiers.host_tier import HostTier
from kvcache.tree_node import TreeNode


@dataclass(slots=True, eq=False)
class TierRead:
    """A cached prefix of `pages` pages that is being read, in the groups' forms: each page is in `device`, or
    in `host` if the device lacks it, and 0 in the other. What is not read is 0 in both."""

    last: TreeNode
    anchor: TreeNode | None  # the last node of the path that is on the device, locked
    pages: int
    device: dict[str, Pages]
    host: dict[str, Pages]
    locked: list[tuple[int, int]]  # pages of the path, from and to, whose host copies are locked


@dataclass(slots=True)
class ReadCounts:
    """Reads that have ended, since the start."""

    host_pages: int = 0  # of the primary group that were read on the host
    host_bytes: int = 0
    failed: int = 0  # reads that did not come to their end


class TierReads:
    """One worker's reads. All methods are called on the tree's thread."""

    def __init__(self, tree: RadixTree, host: HostTier) -> None:
        self.counts = ReadCounts()
        self._tree = tree
        self._host = host
        self._parts = host.parts
        self._primary = tree.components[0].name
        self._open: set[TierRead] = set()

    @property
    def under_way(self) -> int:
        """How many reads have not ended."""
        return len(self._open)

    def begin(self, key: RadixKey, start: int) -> TierRead | None:
        """Read the primary group's pages from `start` on of the longest cached prefix of `key`. None if none
        of them is on the host alone."""
        path, _ = self._tree.walk(key)
        pages = sum(node.num_pages for node in path)
        if pages <= start or path[-1].is_resident:
            return None
        return self._begin(path, pages, {self._primary: start})

    def begin_whole(self, key: RadixKey, starts: Mapping[str, int]) -> TierRead | None:
        """Read what a forward would need at the end of `key`, of each group in `starts` from that page on.
        None if something is on neither tier, or the last page is not whole."""
        path, tokens = self._tree.walk(key)
        path = self._tree.usable(path, tokens // self._tree.page_size, with_host=True)
        pages = sum(node.num_pages for node in path)
        if not path or pages * self._tree.page_size < len(key):
            return None
        return self._begin(path, pages, starts)

    def _begin(self, path: list[TreeNode], pages: int, starts: Mapping[str, int]) -> TierRead | None:
        resident, _ = resident_part(path)
        read = TierRead(path[-1], resident[-1] if resident else None, pages, {}, {}, [])
        for group, start in starts.items():
            part = self._parts[group]
            device, host = part.on_device(path), part.on_host(path)
            wanted = np.arange(len(device)) >= max(part.needed(pages).start, start)
            if not (device | host)[wanted].all():
                return None
            read.device[group] = np.where(wanted, device, 0).astype(np.int32)
            read.host[group] = np.where(wanted & (device == 0), host, 0).astype(np.int32)
        self._lock(read, path)
        self._open.add(read)
        return read

    def end(self, read: TierRead, is_whole: bool) -> None:
        """Nothing of it is read any more. `is_whole`: all of it has been read."""
        self._open.remove(read)
        if is_whole:
            arenas = self._host.pool.arenas
            self.counts.host_pages += int(np.count_nonzero(read.host.get(self._primary, NO_PAGES)))
            for group, ids in read.host.items():
                self.counts.host_bytes += int(np.count_nonzero(ids)) * arenas[group].page_bytes
        else:
            self.counts.failed += 1
        self._unlock(read)

    def _lock(self, read: TierRead, path: Sequence[TreeNode]) -> None:
        if read.anchor is not None:
            self._tree.lock(read.anchor)
        for group, ids in read.device.items():
            self._parts[group].pin(nonzero(ids))
        start = 0
        for node in path:
            end = start + node.num_pages
            if any(
                self._parts[group].portion(ids, start, end, read.pages).any()
                for group, ids in read.host.items()
            ):
                assert node.host is not None, "a node without a copy has pages on the host"
                node.host.locks += 1
                read.locked.append((start, end))
            start = end

    def _unlock(self, read: TierRead) -> None:
        start = 0
        for node in read.last.path():
            end = start + node.num_pages
            if any(first <= start and end <= stop for first, stop in read.locked):
                self._host.unlock(node)
            start = end
        for group, ids in read.device.items():
            self._parts[group].unpin(nonzero(ids))
        if read.anchor is not None:
            self._tree.unlock(read.anchor)
