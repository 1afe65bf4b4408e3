"""Pages that were freed while a launched forward can still touch them, or while they are sent."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from kvcache.memory import Memory
from kvcache.request import GroupPages


class PageReader(Protocol):
    """Reads pages of one request on threads of its own, to send them to another worker."""

    @property
    def idle(self) -> bool:
        """Whether it has read all that it was given, or will not read it."""
        ...

    def abort(self, reason: str) -> None:
        """Begin no other read. Nothing that it has sent is used."""
        ...


class _Held(NamedTuple):
    pages: GroupPages
    launch: int
    reader: PageReader | None


class DeferredFrees:
    """Frees wait here until the last forward that can touch them has given its result, and until the pages
    are not being sent any more.

    Forwards run in launch order, so the engine itself could reuse the pages at once. A remote writer could
    not: a page offered to a peer must not be written by a forward that was launched before. A reader takes
    what is in a page when its thread comes to it, so until then the page must not be another request's.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._held: list[_Held] = []
        self._landed = 0  # number of the newest forward whose result is there

    def hold(self, pages: GroupPages, launch: int, reader: PageReader | None = None) -> None:
        """Free `pages` when the result of forward number `launch` is there and `reader` is idle."""
        if any(map(len, pages.values())):
            self._held.append(_Held(pages, launch, reader))

    def landed(self, launch: int) -> None:
        """The result of forward number `launch`, and of all before it, is there."""
        self._landed = launch
        self.free_unused()

    def free_unused(self) -> None:
        """Free what nothing can touch any more."""
        held, self._held = self._held, []
        for one in held:
            if one.launch > self._landed or (one.reader is not None and not one.reader.idle):
                self._held.append(one)
            else:
                self._memory.free(one.pages)

    def free_all(self) -> None:
        """No forward runs, and what is sent is not used."""
        held, self._held = self._held, []
        for one in held:
            self._memory.free(one.pages)

    def pages(self) -> list[GroupPages]:
        """All pages that wait."""
        return [one.pages for one in self._held]
