"""Tiers: all tiers below the device of one worker."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable

from kvcache.allocator import NO_PAGES, Pages
from kvcache.tiers.host_tier import HostTier
from kvcache.tiers.mover import WorkQueue
from kvcache.tiers.moves import TierMoves
from kvcache.tiers.reads import TierReads
from kvcache.tiers.storage_tier import StorageTier
from kvcache.tree_node import TreeNode


class Tiers:
    """The host tier, its moves and reads, and the storage if there is one. Close it before the pools."""

    def __init__(
        self,
        host: HostTier,
        moves: TierMoves,
        reads: TierReads,
        storage: StorageTier | None,
        mover: WorkQueue,
    ) -> None:
        self.host = host
        self.moves = moves
        self.reads = reads
        self.storage = storage
        self._mover = mover

    def on_done(self, wake: Callable[[], None]) -> None:
        """From now on call `wake`, on another thread, when `poll` has something to do."""
        self._mover.on_done(wake)

    def poll(self) -> bool:
        """Let what has moved enter the tree, and begin to store what is new on the host. Whether anything has
        moved. Never waits."""
        moved = self._mover.take_done()
        if self.storage is not None:
            self.storage.remove_withdrawn()
            self.storage.write_new()
        return moved

    @property
    def is_idle(self) -> bool:
        """Whether nothing moves, and nothing is read where it lies."""
        return not self.uses_device and (self.storage is None or self.storage.is_idle)

    @property
    def uses_device(self) -> bool:
        """Whether a move or a read is under way: it has pages of the device until it ends. `on_done`, or who
        has begun the read, tells of the end."""
        return not self.moves.is_idle or self.reads.under_way > 0

    def forget(self, user: Hashable) -> None:
        """The user waits for nothing any more: not for a load, nor for storage."""
        self.moves.loads.forget(user)
        if self.storage is not None:
            self.storage.prefetches.forget(user)

    def held(self, group: str) -> Pages:
        """Device pages that are neither free nor in the tree."""
        return self.moves.loads.held().get(group, NO_PAGES)

    def check(self, nodes: Iterable[TreeNode]) -> Generator[None, None, None]:
        """Assert that every host page has one owner, and that no copy is locked while nothing moves and
        nobody waits. See Memory.check_slices."""
        moving, is_idle = list(self.moves.held_on_host()), self.is_idle
        if self.storage is not None:
            moving += self.storage.prefetches.held_on_host()
            is_idle = is_idle and not self.storage.prefetches.are_kept
        yield from self.host.check(nodes, moving, is_idle)

    def close(self) -> None:
        """End the threads, then let go of storage and host memory."""
        self._mover.close()
        if self.storage is not None:
            self.storage.backend.close()
        self.host.pool.close()
