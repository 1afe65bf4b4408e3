"""The choice of (P, D), or of D alone.

Policy `kv`, in units of "one prompt token computed by an idle P" (weights: options.PolicyWeights):

    left(w)   = max(1, prompt tokens - tokens that w holds)          the last token is always computed
    cost_P(p) = prefill_queue * tokens queued on p + prefill_left * left(p)
    cost_D(d) = decode_load * requests on d + transfer * left(d)
    alone(d)  = decode_load * requests on d + decode_prefill * left(d)

The cheapest pair costs min cost_P + min cost_D. D alone is a candidate when there is no P, or when
left(d) <= prefill_on_decode_tokens; it wins when alone(d) costs no more than the pair. Candidates are walked
from a different start each time, so equals take turns.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from router.options import PolicyWeights
from wire.errors import ConfigError
from wire.records import WorkerRecord


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that could take the request, as it looks now."""

    record: WorkerRecord
    hit_tokens: int  # prompt tokens it holds, as far as the index knows
    queued_prefill_tokens: int
    requests: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Who does it. `costs` explains: candidate -> cost, one entry per thing that was weighed."""

    decode: Candidate
    prefill: Candidate | None  # None: decode prefills itself
    costs: dict[str, float] = field(default_factory=dict)


class Policy(ABC):
    """Chooses among candidates. One per router."""

    def __init__(self, weights: PolicyWeights, alone_tokens: int) -> None:
        self.weights = weights
        self._alone_tokens = alone_tokens
        self._turn = 0

    @abstractmethod
    def choose(self, prompt_tokens: int, prefill: list[Candidate], decode: list[Candidate]) -> Choice | None:
        """The choice, or None when no decode worker is there."""

    def _may_go_alone(self, prompt_tokens: int, candidate: Candidate) -> bool:
        return _left(prompt_tokens, candidate) <= self._alone_tokens

    def _rotated(self, candidates: list[Candidate]) -> list[Candidate]:
        start = self._turn % len(candidates) if candidates else 0
        return candidates[start:] + candidates[:start]


class KVPolicy(Policy):
    """Prices what is left to prefill against load: see the module's formula."""

    def choose(self, prompt_tokens: int, prefill: list[Candidate], decode: list[Candidate]) -> Choice | None:
        """See Policy."""
        if not decode:
            return None
        self._turn += 1
        weights, costs = self.weights, {}
        best_p, best_p_cost = None, 0.0
        for p in self._rotated(prefill):
            cost = weights.prefill_queue * p.queued_prefill_tokens
            cost += weights.prefill_left * _left(prompt_tokens, p)
            costs[f"prefill {p.record.id}"] = cost
            if best_p is None or cost < best_p_cost:
                best_p, best_p_cost = p, cost
        best_d, best_d_cost = decode[0], float("inf")
        best_alone, best_alone_cost = None, float("inf")
        for d in self._rotated(decode):
            load = weights.decode_load * d.requests
            left = _left(prompt_tokens, d)
            pair_cost = load + weights.transfer * left
            costs[f"decode {d.record.id}"] = pair_cost
            if pair_cost < best_d_cost:
                best_d, best_d_cost = d, pair_cost
            if best_p is None or self._may_go_alone(prompt_tokens, d):
                alone_cost = load + weights.decode_prefill * left
                costs[f"alone {d.record.id}"] = alone_cost
                if alone_cost < best_alone_cost:
                    best_alone, best_alone_cost = d, alone_cost
        if best_alone is not None and (best_p is None or best_alone_cost <= best_p_cost + best_d_cost):
            return Choice(best_alone, None, costs)
        return Choice(best_d, best_p, costs)


class _SimplePolicy(Policy):
    """P and D are picked apart, by one rule that ignores what they hold."""

    def choose(self, prompt_tokens: int, prefill: list[Candidate], decode: list[Candidate]) -> Choice | None:
        """See Policy."""
        if not decode:
            return None
        self._turn += 1
        d = self._pick(self._rotated(decode))
        if not prefill or self._may_go_alone(prompt_tokens, d):
            return Choice(d, None)
        return Choice(d, self._pick(self._rotated(prefill)))

    @abstractmethod
    def _pick(self, candidates: list[Candidate]) -> Candidate:
        """One of them; their order turns by one with every request."""


class RoundRobin(_SimplePolicy):
    """Each in turn."""

    def _pick(self, candidates: list[Candidate]) -> Candidate:
        return candidates[0]


class LeastLoaded(_SimplePolicy):
    """The one with the fewest queued prefill tokens, then the fewest requests."""

    def _pick(self, candidates: list[Candidate]) -> Candidate:
        return min(candidates, key=lambda c: (c.queued_prefill_tokens, c.requests))


class Random(_SimplePolicy):
    """Any one."""

    def _pick(self, candidates: list[Candidate]) -> Candidate:
        return random.choice(candidates)


POLICIES: dict[str, type[Policy]] = {
    "kv": KVPolicy,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "random": Random,
}


def make_policy(name: str, weights: PolicyWeights, alone_tokens: int) -> Policy:
    """The policy of that name. Raises ConfigError listing the names there are."""
    if name not in POLICIES:
        raise ConfigError("policy", f"{name!r} is unknown", f"choose one of {', '.join(POLICIES)}")
    return POLICIES[name](weights, alone_tokens)


def _left(prompt_tokens: int, candidate: Candidate) -> int:
    return max(1, prompt_tokens - candidate.hit_tokens)
