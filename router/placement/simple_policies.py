"""Policies that ignore what workers hold: P and D are chosen apart, by one rule."""

from __future__ import annotations

import random
from abc import abstractmethod
from itertools import count

from router.placement.peer_fetch import PeerFetch
from router.placement.policy import Choice, PlacementRequest, Policy, RoleCandidates
from router.placement_options import PolicyWeights


class SimplePolicy(Policy):
    """D first. It does the request alone when there is no P, or when little is left to compute on it."""

    def choose(self, request: PlacementRequest, prefill: RoleCandidates, decode: RoleCandidates) -> Choice:
        d = self.choose_decode(decode)
        if (
            len(prefill.workers) == 0
            or self.left(request, decode)[decode.workers.slots[d]] <= self.alone_tokens
        ):
            return self._with_fetch(Choice(request, prefill, decode, None, d))
        return self._with_fetch(Choice(request, prefill, decode, self.choose_prefill(prefill), d))

    def _with_fetch(self, choice: Choice) -> Choice:
        """The choice, with the fetch that saves its worker most."""
        offers = self.offers(choice.request, choice.prefill, choice.decode)
        if offers is None:
            return choice
        row = choice.prefill_row
        if row is None:
            row = len(choice.prefill.workers) + choice.decode_row
        return choice._replace(fetch=offers.fetch(row))

    @abstractmethod
    def choose_prefill(self, candidates: RoleCandidates) -> int:
        """Returns a row."""

    @abstractmethod
    def choose_decode(self, candidates: RoleCandidates) -> int:
        """Returns a row."""


class RoundRobin(SimplePolicy):
    """Each worker in turn."""

    def __init__(
        self,
        weights: PolicyWeights,
        alone_tokens: int,
        chance: random.Random,
        peers: PeerFetch | None = None,
    ) -> None:
        super().__init__(weights, alone_tokens, chance, peers)
        self._prefill_turns = count()
        self._decode_turns = count()

    def choose_prefill(self, candidates: RoleCandidates) -> int:
        return next(self._prefill_turns) % len(candidates.workers)

    def choose_decode(self, candidates: RoleCandidates) -> int:
        return next(self._decode_turns) % len(candidates.workers)


class LeastLoaded(SimplePolicy):
    """The P with the fewest queued prefill tokens, the D with the fewest requests."""

    def choose_prefill(self, candidates: RoleCandidates) -> int:
        return self.cheapest(candidates.workers.queued)

    def choose_decode(self, candidates: RoleCandidates) -> int:
        return self.cheapest(candidates.workers.requests)


class Random(SimplePolicy):
    """Any worker."""

    def choose_prefill(self, candidates: RoleCandidates) -> int:
        return self.chance.randrange(len(candidates.workers))

    def choose_decode(self, candidates: RoleCandidates) -> int:
        return self.chance.randrange(len(candidates.workers))
