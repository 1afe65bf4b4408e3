"""Pages that were freed while a launched forward can still touch them."""

from __future__ import annotations

from collections import deque

from kvcache.memory import Memory
from kvcache.request import GroupPages


class DeferredFrees:
    """Frees wait here until the last forward that can touch them has given its result.

    Forwards run in launch order, so for the engine alone an early reuse would be harmless. It is not for
    remote writers: a page offered to a peer must not be written by a forward launched before.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._held: deque[tuple[int, GroupPages]] = deque()

    def hold(self, pages: GroupPages, launch: int) -> None:
        """Free `pages` once forward number `launch` has landed. Numbers given here never fall."""
        if any(map(len, pages.values())):
            self._held.append((launch, pages))

    def landed(self, launch: int) -> None:
        """The result of forward number `launch` is here: so are those of all before it."""
        while self._held and self._held[0][0] <= launch:
            self._memory.free(self._held.popleft()[1])

    def pages(self) -> list[GroupPages]:
        """All that still wait."""
        return [pages for _, pages in self._held]
