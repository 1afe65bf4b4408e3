"""FairQueue: a queue of rooms that is fair between tenants.

Each tenant has a virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI
2024). It grows by what the tenant is served, divided by its weight: by prompt tokens when a room's turn
comes, and by output tokens as they are produced. The waiting tenant with the smallest counter is next. When a
tenant begins to wait, its counter is lifted to where the earliest next turn will end, so idle time earns no
credit.

    A  |#########|.....|       # served, . the prompt whose turn is next
    B  |####|...|              order: B, then C, then A
    C  |######|.......|
    D          |..|            arrives: it starts where B's next turn will end

The paper lifts it to the smallest counter. Then a stream of new tenants, each with one room, could keep those
ahead of them waiting for ever; here the stream moves on. Of tenants with equal counters, the one whose last
turn was, or that began to wait, longest ago is next.

Deficit round robin was rejected. It must know a request's cost when its turn comes, and here most of the
cost, the output, is known only later. Within a tenant, greater priority comes first, then earlier arrival.

Memory is bounded: tenants with rooms are kept, and at most _MOST_IDLE others. A tenant whose counter is not
above the value that it would be lifted to is forgotten without any loss. Pure; belongs to one thread.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
"""A token of output counts as two of a prompt, as in the paper."""
_MOST_IDLE = 4096


class Ahead(NamedTuple):
    """What would be served before a new room, by the current counters."""

    rooms: float
    tokens: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """A room in the queue."""

    room: int
    tenant: str
    order: tuple[int, int]  # within the tenant: -priority, number
    tokens: int  # of its prompt
    until: float


@dataclass(slots=True)
class _Tenant:
    name: str
    weight: float
    counter: float  # what it was served, divided by its weight
    waiting: list[Waiting] = field(default_factory=list)
    waiting_tokens: int = 0
    running: int = 0  # rooms that had their turn and have not ended
    turn: int = 0  # the number of its last turn, or of when it began to wait: decides between equal counters

    def first_end(self) -> float:
        """Its counter after its first waiting room's turn, if nothing of that prompt is cached."""
        return self.counter + INPUT_WEIGHT * self.waiting[0].tokens / self.weight


def _order(waiting: Waiting) -> tuple[int, int]:
    return waiting.order


class FairQueue:
    """Call `push`, `head` and `pop`; then `charge` what the room is served, until it ends with `over`."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        """`weights` are shares of service; a tenant that is not named has weight 1."""
        self._weights = weights
        self._tenants: dict[str, _Tenant] = {}
        self._queued: dict[str, _Tenant] = {}  # tenants that wait
        self._idle: dict[str, _Tenant] = {}  # tenants without rooms, longest idle first
        self._waiting: dict[int, Waiting] = {}  # by room, in the order of arrival
        self._last: _Tenant | None = None  # the tenant of the last turn
        self._running = 0
        self.tokens = 0  # prompt tokens of the rooms that wait
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, room: int) -> bool:
        return room in self._waiting

    def __iter__(self) -> Iterator[Waiting]:
        """In the order of arrival."""
        return iter(self._waiting.values())

    @property
    def tenants(self) -> int:
        """The number of tenants in memory."""
        return len(self._tenants)

    def push(self, room: int, tenant: str, priority: int, tokens: int, until: float) -> None:
        """Add a room. Its prompt `tokens`, at least 1, are charged when its turn comes."""
        assert room not in self._waiting, f"room {room} waits already"
        owner = self._enter(tenant)
        waiting = Waiting(room, tenant, (-priority, next(self._numbers)), max(1, tokens), until)
        insort(owner.waiting, waiting, key=_order)
        owner.waiting_tokens += waiting.tokens
        self.tokens += waiting.tokens
        self._queued[tenant] = owner
        self._waiting[room] = waiting

    def head(self) -> Waiting | None:
        """The room whose turn is next."""
        return self._next().waiting[0] if self._queued else None

    def pop(self) -> Waiting:
        """Give the head its turn. The queue must not be empty."""
        owner = self._next()
        waiting = owner.waiting[0]
        self._take(owner, waiting)
        owner.running += 1
        self._running += 1
        owner.turn = next(self._numbers)
        self._last = owner
        self.charge(waiting.tenant, waiting.tokens, 0)
        return waiting

    def remove(self, room: int) -> None:
        """Remove a room that waits."""
        waiting = self._waiting[room]
        owner = self._tenants[waiting.tenant]
        self._take(owner, waiting)
        self._retire(owner)

    def charge(self, tenant: str, input_tokens: int, output_tokens: int) -> None:
        """A tenant with running rooms was served these tokens. Negative numbers correct an earlier charge."""
        owner = self._tenants[tenant]
        owner.counter += (INPUT_WEIGHT * input_tokens + OUTPUT_WEIGHT * output_tokens) / owner.weight

    def over(self, tenant: str) -> None:
        """One of a tenant's running rooms has ended."""
        owner = self._tenants[tenant]
        owner.running -= 1
        self._running -= 1
        self._retire(owner)

    def ahead(self, tenant: str, priority: int) -> Ahead:
        """What would be served before a room that the tenant pushes now."""
        owner = self._tenants.get(tenant)
        level = self._level()
        weight = self._weights.get(tenant, 1.0)
        tokens, mine = 0.0, 0
        if owner is not None:
            mine = bisect_left(owner.waiting, (1 - priority, 0), key=_order)
            all_of_it = mine == len(owner.waiting)
            tokens = owner.waiting_tokens if all_of_it else sum(one.tokens for one in owner.waiting[:mine])
        rooms = float(mine)
        at = (level if owner is None else max(owner.counter, level)) + INPUT_WEIGHT * tokens / weight
        for other in self._queued.values():
            if other is not owner and other.counter <= at:  # it has waited longer: its first room is ahead
                share = (at - other.counter) * other.weight / (INPUT_WEIGHT * other.waiting_tokens)
                share = min(1.0, share)
                tokens += max(share * other.waiting_tokens, other.waiting[0].tokens)
                rooms += max(share * len(other.waiting), 1.0)
        return Ahead(rooms, tokens)

    # -- inside --------------------------------------------------------------------------------

    def _next(self) -> _Tenant:
        # A heap would have to follow every charge, and few tenants wait.
        return min(self._queued.values(), key=lambda one: (one.counter, one.turn))

    def _level(self) -> float:
        """The counter that a tenant has at least when it begins to wait."""
        if self._queued:
            return min(one.first_end() for one in self._queued.values())
        return self._last.counter if self._last is not None else 0.0

    def _enter(self, name: str) -> _Tenant:
        owner = self._tenants.get(name)
        if owner is None:
            owner = self._tenants[name] = _Tenant(name, self._weights.get(name, 1.0), self._level())
        if not owner.waiting:
            self._idle.pop(name, None)
            owner.counter = max(owner.counter, self._level())
            owner.turn = next(self._numbers)
        return owner

    def _take(self, owner: _Tenant, waiting: Waiting) -> None:
        del self._waiting[waiting.room]
        del owner.waiting[bisect_left(owner.waiting, waiting.order, key=_order)]
        owner.waiting_tokens -= waiting.tokens
        self.tokens -= waiting.tokens
        if not owner.waiting:
            del self._queued[owner.name]

    def _retire(self, owner: _Tenant) -> None:
        """Forget an idle tenant if nothing is lost by it, or if too many tenants are idle."""
        if owner.waiting or owner.running:
            return
        if not self._queued and not self._running:  # no room is left: start afresh
            self._tenants.clear()
            self._idle.clear()
            self._last = None
            return
        level = self._level()
        self._idle[owner.name] = owner
        if owner.counter <= level:
            self._forget(owner)
        elif len(self._idle) > _MOST_IDLE:
            for one in [one for one in self._idle.values() if one.counter <= level]:
                self._forget(one)
            while len(self._idle) > _MOST_IDLE:
                self._forget(next(iter(self._idle.values())))

    def _forget(self, tenant: _Tenant) -> None:
        del self._idle[tenant.name]
        del self._tenants[tenant.name]
