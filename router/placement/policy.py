"""The choice of (P, D), or of D alone: what a policy is told, what it answers, and what each costs.

A policy sees the fleet as arrays (fleet.py) and the prompt's matches by worker; it knows no sockets, no rooms
and no clock, so the router and the simulator run the same one. Policies: kv_policy.py, affinity_policy.py,
simple_policies.py.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from router.index.global_index import Matches
from router.index.page_table import Hashes, Tier
from router.options import PolicyWeights
from router.placement.fleet import Floats, Rows

_ALL_PAGES = int(Tier.GPU)  # the row of `found`; a look-up in an enum takes longer than the one in the array


class Ask(NamedTuple):
    """What a policy may know of a room that wants workers."""

    prompt_tokens: int  # forced tokens of a restart included
    hashes: Hashes  # of the prompt's whole pages
    output_tokens: float  # to be expected
    session: str = ""  # a hint: requests of one session like to meet again
    tenant: str = ""
    priority: int = 0


class RoleCandidates(NamedTuple):
    """One role's workers, and what they hold of the prompt."""

    rows: Rows
    matches: Matches  # of every worker: by slot, not by row
    page_tokens: int
    last: int | None = None  # the row that the session's last request went to

    def held(self, row: int) -> int:
        """Prompt tokens that a worker holds, in any tier, on their way included."""
        pages: int = self.matches.found.item(_ALL_PAGES, self.rows.slots.item(row))
        return pages * self.page_tokens

    def table(self, **costs: Floats | None) -> list[dict[str, object]]:
        """A worker a line, for who asks why; with its costs, where the policy has any."""
        rows, found = self.rows, self.matches
        lines: list[dict[str, object]] = []
        for row, (name, slot) in enumerate(zip(rows.names, rows.slots.tolist(), strict=True)):
            slower = {tier: int(getattr(found, tier)[slot]) for tier in ("host", "storage", "expected")}
            device = int(found.pages[slot]) - sum(slower.values())
            lines.append(
                {
                    "id": name,
                    "held_tokens": {
                        tier: pages * self.page_tokens
                        for tier, pages in ({"device": device} | slower).items()
                    },
                    "queued_prefill_tokens": int(rows.queued[row]),
                    "requests": int(rows.requests[row]),
                    "context_tokens": int(rows.context[row]),
                    "session": row == self.last,
                    **{key: None if cost is None else float(cost[row]) for key, cost in costs.items()},
                }
            )
        return lines


class Picked(NamedTuple):
    """A policy's answer, in rows. `prefill` is None when D does it alone."""

    decode: int
    prefill: int | None


class Policy(ABC):
    """Chooses among workers. One per router; may remember what it chose."""

    def __init__(self, weights: PolicyWeights, alone_tokens: int, chance: random.Random) -> None:
        """D may go alone when at most `alone_tokens` are left to compute. `chance` breaks ties."""
        self.weights = weights
        self.alone_tokens = alone_tokens
        self.chance = chance

    @abstractmethod
    def pick(self, ask: Ask, prefill: RoleCandidates, decode: RoleCandidates) -> Picked:
        """The choice. There is at least one decode worker."""

    def costs(self, ask: Ask, prefill: RoleCandidates, decode: RoleCandidates) -> dict[str, Floats]:  # noqa: ARG002
        """What explains the choice, by row: {} where the policy weighs nothing. Not asked for by `pick`."""
        return {}

    def placed(self, ask: Ask, picked: Picked, prefill: RoleCandidates, decode: RoleCandidates) -> None:  # noqa: B027
        """The choice was taken. Most policies remember nothing."""

    def forget(self, worker: str) -> None:  # noqa: B027  as above
        """A worker has left, or was replaced by one that holds nothing."""

    def left(self, ask: Ask, side: RoleCandidates) -> Floats:
        """Prompt tokens to compute, by row: what slower tiers hold is weighted. The last token always is."""
        credits = self.weights.host_credit, self.weights.storage_credit, self.weights.expected_credit
        pages = side.matches.found.take(side.rows.slots, 1)
        saved = pages[Tier.GPU] * float(side.page_tokens)
        for tier, credit in zip((Tier.CPU, Tier.STORAGE, Tier.EXPECTED), credits, strict=True):
            saved += pages[tier] * ((credit - 1.0) * side.page_tokens)
        left: Floats = np.maximum(1.0, ask.prompt_tokens - saved)
        return left

    def cheapest(self, costs: Floats) -> int:
        """The row that costs least; equals take turns by chance. With a temperature, nearly so."""
        best = int(costs.argmin())
        if self.weights.temperature > 0:
            odds = np.exp((costs[best] - costs) / self.weights.temperature).cumsum()
            return int(odds.searchsorted(self.chance.random() * odds[-1], "right"))
        equals = (costs == costs[best]).nonzero()[0]
        return best if len(equals) == 1 else int(equals[self.chance.randrange(len(equals))])
