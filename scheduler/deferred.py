"""Pages that were freed while a launched forward can still touch them."""

from __future__ import annotations

from collections import deque

from kvcache.memory import Memory
from kvcache.request import GroupPages


class DeferredFrees:
    """Frees wait here until the last forward that can touch them has given its result.

    Forwards run in launch order, so the engine itself could reuse the pages at once. A remote writer could
    not: a page offered to a peer must not be written by a forward that was launched before.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._held: deque[tuple[int, GroupPages]] = deque()

    def hold(self, pages: GroupPages, launch: int) -> None:
        """Free `pages` when the result of forward number `launch` is there. Launch numbers never decrease."""
        if any(map(len, pages.values())):
            self._held.append((launch, pages))

    def landed(self, launch: int) -> None:
        """The result of forward number `launch`, and of all before it, is there."""
        while self._held and self._held[0][0] <= launch:
            self._memory.free(self._held.popleft()[1])

    def pages(self) -> list[GroupPages]:
        """All pages that wait."""
        return [pages for _, pages in self._held]
