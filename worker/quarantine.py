"""Quarantine: pages of rooms that ended while a peer could still write to them."""

from __future__ import annotations

from kvcache.memory import GroupPages, Memory
from kvtransfer.transport import Fence
from worker.holds import QuarantineOwner


class Quarantine:
    """Pages wait here until the transport's fence has passed (docs/decisions/0004-fences.md)."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._fences: dict[QuarantineOwner, Fence] = {}

    def __len__(self) -> int:
        return len(self._fences)

    def hold(self, owner: QuarantineOwner, pages: GroupPages, fence: Fence) -> None:
        """The room has ended; `pages` were reserved for its KV."""
        self._memory.quarantine(pages, owner)
        self._fences[owner] = fence
        self.lift()

    def lift(self) -> None:
        """Free what no write can reach any more."""
        for owner, fence in list(self._fences.items()):
            if fence.passed:
                del self._fences[owner]
                self._memory.release_quarantine(owner)
