"""Policies that ignore what workers hold: P and D are chosen apart, by one rule."""

from __future__ import annotations

import random
from abc import abstractmethod
from itertools import count

from router.options import PolicyWeights
from router.placement.policy import Choice, PlacementRequest, Policy, RoleCandidates


class SimplePolicy(Policy):
    """D first. It does the request alone when there is no P, or when little is left to compute on it."""

    def choose(self, request: PlacementRequest, prefill: RoleCandidates, decode: RoleCandidates) -> Choice:
        d = self.choose_decode(decode)
        if (
            len(prefill.workers) == 0
            or self.left(request, decode)[decode.workers.slots[d]] <= self.alone_tokens
        ):
            return Choice(request, prefill, decode, None, d)
        return Choice(request, prefill, decode, self.choose_prefill(prefill), d)

    @abstractmethod
    def choose_prefill(self, candidates: RoleCandidates) -> int:
        """Returns a row."""

    @abstractmethod
    def choose_decode(self, candidates: RoleCandidates) -> int:
        """Returns a row."""


class RoundRobin(SimplePolicy):
    """Each worker in turn."""

    def __init__(self, weights: PolicyWeights, alone_tokens: int, chance: random.Random) -> None:
        super().__init__(weights, alone_tokens, chance)
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
