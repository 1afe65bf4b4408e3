"""WaitingQueue: the requests that wait for admission, in the order of their admission."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler.req import Req


def _order(req: Req) -> tuple[bool, tuple[int, int, int]]:
    """Requests that have run before come first, then the greater priority, then the earlier arrival."""
    return (not req.resumed, req.rank)


class WaitingQueue:
    """A sorted list. Few requests have a priority, and aborts remove from the middle.

    A deque per priority would append in O(1) but still remove in O(n). The router bounds the queue (429) long
    before the cost of a bisect matters.
    """

    def __init__(self) -> None:
        self._reqs: list[Req] = []

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._reqs)

    @property
    def head(self) -> Req | None:
        """The request that must be admitted before any other."""
        return self._reqs[0] if self._reqs else None

    def push(self, req: Req) -> None:
        """Add a request. `req.resumed` must not change while it waits."""
        insort(self._reqs, req, key=_order)

    def pop(self) -> Req:
        """Remove and return the head."""
        return self._reqs.pop(0)

    def remove(self, req: Req) -> None:
        """Remove a request, which must be in the queue."""
        del self._reqs[self.place(req)]

    def place(self, req: Req) -> int:
        """How many requests are ahead of this one, which must be in the queue."""
        place = bisect_left(self._reqs, _order(req), key=_order)
        assert self._reqs[place] is req, f"room {req.room} is not waiting"
        return place

    def tokens(self) -> int:
        """Tokens that the waiting requests have to prefill if nothing of them is cached."""
        return sum(req.prefill_len for req in self._reqs)
