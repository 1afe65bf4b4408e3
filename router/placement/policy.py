"""Policy: chooses (P, D), or D alone, for a room.

A policy sees the fleet as arrays (fleet_table.py) and the prompt's matches by worker. It knows no sockets, no
rooms and no clock, so the router and the simulator run the same one. Policies: kv_policy.py,
affinity_policy.py, simple_policies.py.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from router.index.global_index import Matches
from router.index.page_table import Hashes, Tier
from router.placement.fleet_table import Floats, WorkerArrays
from router.placement.load_estimate import WorkerLoadEstimate
from router.placement.peer_fetch import FetchPlan, Offers, PeerFetch
from router.placement.transfer_rates import TransferRates
from router.placement_options import PolicyWeights

_ALL_PAGES = int(Tier.GPU)  # the row of `found`; a look-up in an enum takes longer than the one in the array


class PlacementRequest(NamedTuple):
    """What a policy is told of a room that needs workers."""

    prompt_tokens: int  # forced tokens of a restart included
    hashes: Hashes  # of the prompt's whole pages
    output_tokens: float  # to be expected
    session: str = ""  # a hint: requests of one session prefer the same workers
    tenant: str = ""
    priority: int = 0
    alone: bool = False  # D computes the prompt, too
    public_hashes: Hashes | None = None  # of a tenant's prompt: the names of the same pages where public


class RoleCandidates(NamedTuple):
    """One role's workers, and what they hold of the prompt."""

    workers: WorkerArrays
    matches: Matches  # of every worker: by slot, not by row
    page_tokens: int
    last: int | None = None  # the row that the session's last request went to

    def held(self, row: int) -> int:
        """Prompt tokens that a worker holds in any tier, those on their way included."""
        pages: int = self.matches.found.item(_ALL_PAGES, self.workers.slots.item(row))
        return pages * self.page_tokens

    def table(self, **costs: Floats | None) -> list[dict[str, object]]:
        """One dict per worker for /debug/route: what it holds, its load, and each of `costs` (by row)."""
        workers, found = self.workers, self.matches
        lines: list[dict[str, object]] = []
        for row, (name, slot) in enumerate(zip(workers.names, workers.slots.tolist(), strict=True)):
            slower = {tier: int(getattr(found, tier)[slot]) for tier in ("host", "storage", "expected")}
            device = int(found.pages[slot]) - sum(slower.values())
            lines.append(
                {
                    "id": name,
                    "held_tokens": {
                        tier: pages * self.page_tokens
                        for tier, pages in ({"device": device} | slower).items()
                    },
                    "queued_prefill_tokens": int(workers.queued[row]),
                    "requests": int(workers.requests[row]),
                    "context_tokens": int(workers.context[row]),
                    "session": row == self.last,
                    **{key: None if cost is None else float(cost[row]) for key, cost in costs.items()},
                }
            )
        return lines


class Choice(NamedTuple):
    """The workers that a policy chose for a request, and the candidates that it chose from."""

    request: PlacementRequest
    prefill: RoleCandidates
    decode: RoleCandidates
    prefill_row: int | None  # None: D computes the prompt, too
    decode_row: int
    fetch: FetchPlan | None = None  # by the worker that computes the prompt

    @property
    def prefill_worker(self) -> WorkerLoadEstimate | None:
        """P, or None when D computes the prompt, too."""
        return None if self.prefill_row is None else self.prefill.workers.estimates[self.prefill_row]

    @property
    def decode_worker(self) -> WorkerLoadEstimate:
        """D."""
        return self.decode.workers.estimates[self.decode_row]

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that the worker which computes the prompt holds, or will have fetched."""
        fetched = 0 if self.fetch is None else self.fetch.tokens
        if self.prefill_row is not None:
            return self.prefill.held(self.prefill_row) + fetched
        return self.decode.held(self.decode_row) + fetched


class Policy(ABC):
    """Chooses among workers. One per router; it may remember what was chosen."""

    def __init__(
        self,
        weights: PolicyWeights,
        alone_tokens: int,
        chance: random.Random,
        peers: PeerFetch | None = None,
    ) -> None:
        """D may do a request alone when at most `alone_tokens` are left to compute. `chance` breaks ties.
        Without `peers`, nobody is told to fetch."""
        self.weights = weights
        self.peers = peers
        self.alone_tokens = alone_tokens
        self.chance = chance
        self.transfers = TransferRates()  # of the fleet; told by the placer
        # The first row of `found` counts the pages of all tiers, so the others subtract what is not saved.
        credits = weights.host_credit, weights.storage_credit, weights.expected_credit
        self._saved_by_tier = np.array([[1.0], *([credit - 1.0] for credit in credits)])

    @abstractmethod
    def choose(self, request: PlacementRequest, prefill: RoleCandidates, decode: RoleCandidates) -> Choice:
        """Choose. There is at least one decode worker."""

    def costs(self, choice: Choice) -> dict[str, Floats]:  # noqa: ARG002
        """The costs that led to a choice, by row; {} for a policy without costs. For /debug/route."""
        return {}

    def placed(self, choice: Choice) -> None:  # noqa: B027
        """The choice was taken. Most policies remember nothing."""

    def forget(self, worker: str) -> None:  # noqa: B027  as above
        """A worker has left, or was replaced by one that holds nothing."""

    def offers(
        self, request: PlacementRequest, prefill: RoleCandidates, decode: RoleCandidates
    ) -> Offers | None:
        """What each worker could fetch from another, if workers fetch and anybody holds something."""
        if self.peers is None:
            return None
        return self.peers.offers(
            request.prompt_tokens, decode.page_tokens, decode.matches, prefill.workers, decode.workers,
            self.transfers,
        )  # fmt: skip

    def left(self, request: PlacementRequest, candidates: RoleCandidates) -> Floats:
        """Prompt tokens to compute, by slot, at least 1. What slower tiers hold is weighted."""
        saved = np.add.reduce(candidates.matches.found * self._saved_by_tier, 0)
        saved *= candidates.page_tokens
        left: Floats = np.maximum(request.prompt_tokens - saved, 1.0)
        return left

    def cheapest(self, costs: Floats) -> int:
        """The row that costs least; equal rows take turns by chance. With a temperature, one by its odds."""
        best = int(costs.argmin())
        if self.weights.temperature > 0:
            odds = np.exp((costs[best] - costs) / self.weights.temperature).cumsum()
            return int(odds.searchsorted(self.chance.random() * odds[-1], "right"))
        equals = (costs == costs[best]).nonzero()[0]
        return best if len(equals) == 1 else int(equals[self.chance.randrange(len(equals))])
