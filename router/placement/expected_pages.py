"""ExpectedPages: pages on their way to workers, which the index counts as held.

Without them, a burst of requests with one new prefix would be spread over workers that each compute it. An
expectation ends one second after the page is there, when its event must have come, or when it is too old.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from router.index.global_index import GlobalIndex
from router.index.page_table import Hashes

_EVENT_S = 1.0  # the longest time from a page's arrival to its event


class Expectation(msgspec.Struct, gc=False, eq=False):  # many thousands live; none is part of a cycle
    """Pages on their way to the worker in `slot`.

    If the slot belongs to another worker by the end, that worker is expected to hold a little less.
    """

    until: float
    slot: int
    hashes: Hashes
    over: bool = False


class ExpectedPages:
    """Writes expectations into an index and removes them in time. `now` is in seconds, of any origin."""

    def __init__(self, index: GlobalIndex, expect_s: float) -> None:
        """Pages that have not come within `expect_s` are given up."""
        self._index = index
        self._expect_s = expect_s
        self._expected: deque[Expectation] = deque()  # in the order of their `until`
        self._arrived: deque[tuple[float, Expectation]] = deque()  # their events may still be on the way

    def expect(self, slot: int, hashes: Hashes, now: float) -> Expectation:
        """Pages will be on the worker in `slot`."""
        expectation = Expectation(now + self._expect_s, slot, hashes)
        if len(hashes):
            self._index.expect(slot, hashes)
            self._expected.append(expectation)
        return expectation

    def arrived(self, expectations: Iterable[Expectation], now: float) -> None:
        """The pages are on their workers, or will not come. Repeated calls change nothing."""
        for one in expectations:
            if len(one.hashes) and not one.over:
                self._arrived.append((now + _EVENT_S, one))

    def tick(self, now: float) -> None:
        """Remove the expectations that are over."""
        while self._arrived and self._arrived[0][0] <= now:
            self._end(self._arrived.popleft()[1])
        while self._expected and self._expected[0].until <= now:
            self._end(self._expected.popleft())

    def _end(self, expectation: Expectation) -> None:
        if not expectation.over:
            expectation.over = True
            self._index.unexpect(expectation.slot, expectation.hashes)
