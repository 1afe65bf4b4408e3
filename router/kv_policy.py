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
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from router.fleet import Floats, Rows
from router.options import PolicyWeights
from router.policy import Ask, Picked, Policy, Side


class KVPolicy(Policy):
    """See the module."""

    def __init__(self, weights: PolicyWeights, alone_tokens: int, chance: random.Random) -> None:
        super().__init__(weights, alone_tokens, chance)
        self._neighbours: _Neighbours | None = None

    def pick(self, ask: Ask, prefill: Side, decode: Side) -> Picked:
        """See Policy."""
        weights = self.weights
        load = self._load(ask, decode)
        costs = {"load": load}
        best_alone = self._alone(decode, load, costs, must=len(prefill.rows) == 0)
        if len(prefill.rows) == 0:
            assert best_alone is not None
            return Picked(best_alone, None, costs)
        cost_p = self._prefill(prefill)
        move = (ask.prompt_tokens - decode.held) * weights.transfer
        cost_d = load + move
        costs["prefill"], costs["decode"] = cost_p, cost_d
        p, d, cost = self._best_pair(prefill.rows, decode.rows, cost_p, cost_d, move)
        if best_alone is not None and costs["alone"][best_alone] <= cost:
            return Picked(best_alone, None, costs)
        return Picked(d, p, costs)

    def _prefill(self, prefill: Side) -> Floats:
        """cost_P by row."""
        weights, queued = self.weights, prefill.rows.queued
        cost: Floats = queued - queued.min()
        cost *= cost / weights.queue_objective
        cost += queued
        cost *= weights.prefill_queue
        cost += prefill.left * weights.prefill_left
        if prefill.last is not None:
            cost[prefill.last] -= weights.session
        return cost

    def _load(self, ask: Ask, decode: Side) -> Floats:
        """load_D by row."""
        weights, rows = self.weights, decode.rows
        load = rows.requests * weights.decode_load
        load += rows.context * weights.decode_context
        need, spare = ask.prompt_tokens + ask.output_tokens, rows.capacity - rows.context
        if spare[spare.argmin()] < need:
            load += np.maximum(need - spare, 0.0) * weights.decode_full
        if decode.last is not None:
            load[decode.last] -= weights.session
        return load

    def _alone(self, decode: Side, load: Floats, costs: dict[str, Floats], must: bool) -> int | None:
        """The best decode worker to do it alone; None when none may."""
        left = decode.left
        if not must and left[left.argmin()] > self.alone_tokens:
            return None
        weights = self.weights
        alone = load + weights.prefill_queue * decode.rows.queued + weights.decode_prefill * left
        if not must:
            alone[left > self.alone_tokens] = np.inf
        costs["alone"] = alone
        return self.cheapest(alone)

    def _best_pair(
        self, prefill: Rows, decode: Rows, cost_p: Floats, cost_d: Floats, move: Floats
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

    prefill_hosts: npt.NDArray[np.intp]  # of these rows
    decode_hosts: npt.NDArray[np.intp]
    any: bool
    prefill: npt.NDArray[np.intp]  # P rows, host by host
    starts: npt.NDArray[np.intp]  # where in `prefill` each host begins
    host: npt.NDArray[np.intp]  # by D row: which of `starts`; any, where nothing is spared
    spared: Floats  # by D row: the part of `move` that a P on the same host spares; 0 where none is there


def _neighbours(
    prefill_hosts: npt.NDArray[np.intp], decode_hosts: npt.NDArray[np.intp], same_host: float
) -> _Neighbours:
    order = prefill_hosts.argsort(kind="stable")
    hosts, starts = np.unique(prefill_hosts[order], return_index=True)
    shared = np.isin(decode_hosts, hosts)
    host = np.searchsorted(hosts, decode_hosts) * shared
    spared = np.multiply(shared, 1.0 - same_host, dtype=np.float64)
    return _Neighbours(prefill_hosts, decode_hosts, bool(shared.any()), order, starts, host, spared)
