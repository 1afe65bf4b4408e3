"""Requests that wait for admission, in the order in which they get it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler.req import Req


def _order(req: Req) -> tuple[bool, int, int]:
    """Those that have run before first, then greater priority, then first come."""
    return (not req.resumed, -req.priority, req.arrival)


class WaitingQueue:
    """A sorted list: priorities change the place of few requests, and aborts remove from the middle.

    A deque per priority would make the common append O(1), but removal O(n) all the same, and the queue is
    bounded by the router's 429 long before a bisect of it shows.
    """

    def __init__(self) -> None:
        self._reqs: list[Req] = []

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._reqs)

    @property
    def head(self) -> Req | None:
        """Who must be admitted before anybody else is."""
        return self._reqs[0] if self._reqs else None

    def push(self, req: Req) -> None:
        """Take a place. `req.resumed`, priority and arrival must not change while it waits."""
        insort(self._reqs, req, key=_order)

    def pop(self) -> Req:
        """Remove and return the head."""
        return self._reqs.pop(0)

    def remove(self, req: Req) -> None:
        """Leave the queue from anywhere; the request must be in it."""
        place = bisect_left(self._reqs, _order(req), key=_order)
        assert self._reqs[place] is req, f"room {req.room} is not waiting"
        del self._reqs[place]

    def tokens(self) -> int:
        """Tokens that the waiting requests will compute if nothing of them is cached."""
        return sum(req.prefill_len for req in self._reqs)
