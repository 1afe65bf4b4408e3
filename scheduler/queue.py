"""WaitingQueue: the requests that wait for memory, fair between tenants.

Requests that have run before come first. Of the others the tenant that was served least is next; within a
tenant the greater priority, then the earlier arrival. "Served" is a virtual token counter (Sheng et al.,
"Fairness in Serving Large Language Models", OSDI 2024): it grows by the tokens that a request's turn costs.

    A  |#########|.....|       # served, . the request whose turn is next
    B  |####|...|              next: B, then C, D, A
    C  |######|.......|
    D          |..|            has just come: it begins where the earliest next turn, B's, will end

So idle time earns nothing, and a tenant that begins to wait waits for at most one turn of each other tenant,
whatever their number of requests. The next request stays the next until its turn: what is too large for the
free memory is not passed by others. The paper lets a tenant begin at the smallest counter. Then a stream of
new tenants, each with one request, could keep those ahead of them waiting for ever; here the stream moves on.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from heapq import merge
from itertools import accumulate, chain, count, islice
from math import inf
from operator import itemgetter

from scheduler.req import Req


def _rank(req: Req) -> tuple[int, int, int]:
    return req.rank


@dataclass(slots=True, eq=False)
class _Line:
    """A tenant's requests that wait, sorted, and its counter."""

    served: int = 0  # virtual tokens
    since: int = 0  # the number of its last turn, or of when it began to wait: decides between equal counters
    reqs: list[Req] = field(default_factory=list)
    known: list[tuple[int, float]] | None = None  # all turns, since the last change

    def turns(self, most: int | None = None) -> list[tuple[int, float]]:
        """`served` and `since` at each request's turn, if nothing of them is cached, of the first `most` or
        of all. Turns to come have no number yet: `inf`."""
        starts = accumulate((req.prefill_len for req in self.reqs[:most][:-1]), initial=self.served)
        return [(start, inf if index else self.since) for index, start in enumerate(starts)]

    def all_turns(self) -> list[tuple[int, float]]:
        """All of them, computed once per change: thousands of rooms may ask for their places."""
        if self.known is None:
            self.known = self.turns()
        return self.known


class WaitingQueue:
    """A sorted list per tenant. Few requests have a priority, and aborts remove from the middle.

    A deque per priority would append in O(1) but still remove in O(n). The router bounds the queue (429) long
    before the cost of a bisect matters. A heap of tenants would have to follow every removal, and few wait.
    """

    def __init__(self) -> None:
        self._resumed: list[Req] = []
        self._lines: dict[str, _Line] = {}  # of tenants that wait
        self._idle: dict[str, _Line] = {}  # of other tenants, if forgetting them would be a gain for them
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._resumed) + sum(len(line.reqs) for line in self._lines.values())

    @property
    def head(self) -> Req | None:
        """The request that must be admitted before any other."""
        if self._resumed:
            return self._resumed[0]
        return self._next().reqs[0] if self._lines else None

    def first(self, most: int) -> list[Req]:
        """The next requests, `most` or all, in the order of their turns if nothing of them is cached."""
        lines = [zip(line.turns(most), line.reqs, strict=False) for line in self._lines.values()]
        others = (req for _, req in merge(*lines, key=itemgetter(0)))
        return list(islice(chain(self._resumed, others), most))

    def push(self, req: Req) -> None:
        """Add a request. `req.resumed` must not change while it waits."""
        insort(self._resumed if req.resumed else self._enter(req.tenant).reqs, req, key=_rank)

    def pop(self) -> Req:
        """Remove and return the head, which has its memory. Its tenant is charged for what was not cached."""
        if self._resumed:
            return self._resumed.pop(0)
        line = self._next()
        req = line.reqs[0]
        line.served += max(1, req.prefill_len - req.cache_protected_len)
        line.since = next(self._numbers)
        self._leave(req, 0)
        return req

    def remove(self, req: Req) -> None:
        """Remove a request, which must be in the queue."""
        if req.resumed:
            del self._resumed[_index(req, self._resumed)]
        else:
            self._leave(req, _index(req, self._lines[req.tenant].reqs))

    def place(self, req: Req) -> int:
        """How many requests are ahead of this one, which must be in the queue, if nothing of those that wait
        is cached."""
        if req.resumed:
            return _index(req, self._resumed)
        mine = self._lines[req.tenant]
        index = _index(req, mine.reqs)
        ahead = len(self._resumed) + index
        if len(self._lines) == 1:
            return ahead
        turn = mine.all_turns()[index]
        others = (line.all_turns() for line in self._lines.values() if line is not mine)
        return ahead + sum(bisect_left(turns, turn) for turns in others)

    def tokens(self) -> int:
        """Tokens that the waiting requests have to prefill if nothing of them is cached."""
        lines = (self._resumed, *(line.reqs for line in self._lines.values()))
        return sum(req.prefill_len for reqs in lines for req in reqs)

    # -- tenants -----------------------------------------------------------------------------------

    def _next(self) -> _Line:
        return min(self._lines.values(), key=lambda line: (line.served, line.since))

    def _beginning(self) -> int:
        """The counter that a tenant has at least when it begins to wait."""
        return min((line.served + line.reqs[0].prefill_len for line in self._lines.values()), default=0)

    def _enter(self, tenant: str) -> _Line:
        line = self._lines.get(tenant)
        if line is None:
            line = self._idle.pop(tenant, None) or _Line()
            line.served = max(line.served, self._beginning())
            line.since = next(self._numbers)
            self._lines[tenant] = line
        line.known = None
        return line

    def _leave(self, req: Req, index: int) -> None:
        line = self._lines[req.tenant]
        del line.reqs[index]
        line.known = None
        if line.reqs:
            return
        self._idle[req.tenant] = self._lines.pop(req.tenant)
        beginning = self._beginning()
        # When nobody waits there is nobody to compare with: the counters start afresh.
        kept = self._idle.items() if self._lines else ()
        self._idle = {tenant: line for tenant, line in kept if line.served > beginning}


def _index(req: Req, reqs: list[Req]) -> int:
    index = bisect_left(reqs, req.rank, key=_rank)
    assert reqs[index : index + 1] == [req], f"room {req.room} is not waiting"
    return index
