"""Policy `kv`: prices what is left to compute and to move against load, for P and D together.

In units of "the wait for one queued prompt token" (weights: options.PolicyWeights; h is what a worker
holds, s what that saves when slower tiers are weighted, q the prompt tokens queued on it):

    left(w)    = max(1, prompt - s(w))
    cost_P(p)  = prefill_queue (q(p) + (q(p) - min q)^2 / queue_objective) + prefill_left left(p)
    load_D(d)  = decode_load requests(d) + decode_context context(d) + decode_full lacking(d)
    move(p, d) = transfer (prompt - h(d)), times same_host where p and d share a host
    pair(p, d) = cost_P(p) + load_D(d) + move(p, d)
    alone(d)   = load_D(d) + prefill_queue q(d) + decode_prefill left(d)

`lacking` is how much of prompt + expected output exceeds the memory that D's requests leave. cost_P and
load_D are less by `session` for the workers of the session's last request. What a queue has more than the
shortest is priced convex, so that a worker with a hot prefix is left once that nears the objective: the
prefix then gets a second holder. (Convex in the whole queue is a way into collapse: when all are long, hits
are left for little, which makes work for everybody.) D alone is a candidate when there is no P or
left(d) <= alone_tokens; it wins when it costs no more than the best pair.

It is priced in C++ (native/kv_prices.h): forty calls of numpy took as long for two workers as for 64, and
longer than everything else of a decision. The reference in numpy explains costs, and takes over where nothing
can be compiled, and where there is a temperature: no two libraries round its exp() alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from router.index.native.build import native
from router.options import PolicyWeights
from router.placement.fleet_table import Floats, WorkerArrays
from router.placement.policy import Choice, PlacementRequest, Policy, RoleCandidates

_Integers = npt.NDArray[np.int64]


class KVPolicy(Policy):
    """See the module."""

    def __init__(self, weights: PolicyWeights, alone_tokens: int, chance: random.Random) -> None:
        super().__init__(weights, alone_tokens, chance)
        self._compiled = _compiled(weights, alone_tokens)
        self._neighbours: _Neighbours | None = None

    def choose(self, ask: PlacementRequest, prefill: RoleCandidates, decode: RoleCandidates) -> Choice:
        if self._compiled is None:
            return self._choose(ask, prefill, decode)
        p, d = prefill.workers, decode.workers
        decoder, prefiller = self._compiled.pick(
            ask.prompt_tokens, ask.output_tokens, decode.page_tokens, decode.matches.found,
            p.figures, p.slots, p.hosts, prefill.last, d.figures, d.slots, d.hosts, decode.last,
            self.chance.randrange,
        )  # fmt: skip
        return Choice(ask, prefill, decode, prefiller, decoder)

    def costs(self, choice: Choice) -> dict[str, Floats]:
        return self._costs(choice.request, choice.prefill, choice.decode)

    def _costs(
        self, ask: PlacementRequest, prefill: RoleCandidates, decode: RoleCandidates
    ) -> dict[str, Floats]:
        """`alone` is there when one may, infinite for the others; `decode` is with the move."""
        load = self._load(ask, decode)
        costs = {"load": load}
        if (alone := self._alone(ask, decode, load, must=len(prefill.workers) == 0)) is not None:
            costs["alone"] = alone
        if len(prefill.workers):
            held = decode.matches.pages.take(decode.workers.slots) * np.float64(decode.page_tokens)
            costs["move"] = (ask.prompt_tokens - held) * self.weights.transfer
            costs["decode"] = load + costs["move"]
            costs["prefill"] = self._prefill(ask, prefill)
        return costs

    def _choose(self, ask: PlacementRequest, prefill: RoleCandidates, decode: RoleCandidates) -> Choice:
        """The reference."""
        costs = self._costs(ask, prefill, decode)
        alone = self.cheapest(costs["alone"]) if "alone" in costs else None
        if "prefill" not in costs:
            assert alone is not None
            return Choice(ask, prefill, decode, None, alone)
        p, d, cost = self._best_pair(
            prefill.workers, decode.workers, costs["prefill"], costs["decode"], costs["move"]
        )
        if alone is not None and costs["alone"][alone] <= cost:
            return Choice(ask, prefill, decode, None, alone)
        return Choice(ask, prefill, decode, p, d)

    def _prefill(self, ask: PlacementRequest, prefill: RoleCandidates) -> Floats:
        """cost_P by row."""
        weights, queued = self.weights, prefill.workers.queued
        cost: Floats = queued - queued.min()
        cost *= cost / weights.queue_objective
        cost += queued
        cost *= weights.prefill_queue
        cost += self.left(ask, prefill) * weights.prefill_left
        if prefill.last is not None:
            cost[prefill.last] -= weights.session
        return cost

    def _load(self, ask: PlacementRequest, decode: RoleCandidates) -> Floats:
        """load_D by row."""
        weights, rows = self.weights, decode.workers
        load = rows.requests * weights.decode_load
        load += rows.context * weights.decode_context
        need, spare = ask.prompt_tokens + ask.output_tokens, rows.capacity - rows.context
        load += np.maximum(need - spare, 0.0) * weights.decode_full
        if decode.last is not None:
            load[decode.last] -= weights.session
        return load

    def _alone(
        self, ask: PlacementRequest, decode: RoleCandidates, load: Floats, must: bool
    ) -> Floats | None:
        """`alone` by row; None when none may."""
        left, weights = self.left(ask, decode), self.weights
        if not must and left.min() > self.alone_tokens:
            return None
        alone = load + weights.prefill_queue * decode.workers.queued + weights.decode_prefill * left
        if not must:
            alone[left > self.alone_tokens] = np.inf
        return alone

    def _best_pair(
        self, prefill: WorkerArrays, decode: WorkerArrays, cost_p: Floats, cost_d: Floats, move: Floats
    ) -> tuple[int, int, float]:
        """The cheapest (P row, D row), and what they cost.

        First D, as it costs with the P that suits it best; then P for that D. The two depend on each other by
        their host alone, so there is no matrix of all pairs.
        """
        near = self._neighbours
        if near is None or near.prefill_hosts is not prefill.hosts or near.decode_hosts is not decode.hosts:
            near = self._neighbours = _neighbours(prefill.hosts, decode.hosts, self.weights.same_host)
        if not near.any:
            p, d = self.cheapest(cost_p), self.cheapest(cost_d)
            return p, d, float(cost_p[p] + cost_d[d])
        spared = move * near.spared
        by_host = np.minimum.reduceat(cost_p[near.prefill], near.starts)
        pairs = by_host[near.host]
        pairs -= spared
        np.minimum(pairs, cost_p[cost_p.argmin()], out=pairs)
        pairs += cost_d
        d = self.cheapest(pairs)
        if near.spared[d]:
            cost_p = cost_p - spared[d] * (prefill.hosts == decode.hosts[d])
        p = self.cheapest(cost_p)
        return p, d, float(cost_p[p] + cost_d[d])


@dataclass(frozen=True, slots=True)
class _Neighbours:
    """Who shares a host with whom. Changes only with the fleet's members, so it is kept between choices."""

    prefill_hosts: _Integers  # of these rows
    decode_hosts: _Integers
    any: bool
    prefill: npt.NDArray[np.intp]  # P rows, host by host
    starts: npt.NDArray[np.intp]  # where in `prefill` each host begins
    host: npt.NDArray[np.intp]  # by D row: which of `starts`; any, where nothing is spared
    spared: Floats  # by D row: the part of `move` that a P on the same host spares; 0 where none is there


def _neighbours(prefill_hosts: _Integers, decode_hosts: _Integers, same_host: float) -> _Neighbours:
    order = prefill_hosts.argsort(kind="stable")
    hosts, starts = np.unique(prefill_hosts[order], return_index=True)
    shared = np.isin(decode_hosts, hosts)
    host = np.searchsorted(hosts, decode_hosts) * shared
    spared = np.multiply(shared, 1.0 - same_host, dtype=np.float64)
    return _Neighbours(prefill_hosts, decode_hosts, bool(shared.any()), order, starts, host, spared)


class _Compiled(Protocol):
    """baton_router.KVPrices: what `pick` does, by the same prices and the same chance."""

    def pick(
        self,
        prompt_tokens: int,
        output_tokens: float,
        page_tokens: int,
        found: npt.NDArray[np.int32],
        prefill_figures: Floats,
        prefill_slots: _Integers,
        prefill_hosts: _Integers,
        prefill_last: int | None,
        decode_figures: Floats,
        decode_slots: _Integers,
        decode_hosts: _Integers,
        decode_last: int | None,
        draw: Callable[[int], int],
        /,
    ) -> tuple[int, int | None]:
        """WorkerArrays of D and P. `draw(n)` is a number below n, called when n cost the same."""


def _compiled(weights: PolicyWeights, alone_tokens: int) -> _Compiled | None:
    module = native()
    if module is None or weights.temperature > 0:
        return None
    named = weights.model_dump(exclude={"temperature", "requests_objective"})
    credits = tuple(named.pop(f"{tier}_credit") - 1.0 for tier in ("host", "storage", "expected"))
    made: _Compiled = module.KVPrices(**named, credits=credits, alone_tokens=alone_tokens)
    return made
