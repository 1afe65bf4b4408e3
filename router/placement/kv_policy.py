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
load_D are reduced by `session` for the workers of the session's last request. Only what a queue has more than
the shortest is priced convex. So a worker with a hot prefix is left once that excess nears the objective, and
the prefix gets a second holder. (If the whole queue were convex, long queues on all workers would make hits
worth little, and misses add work for all workers.) D alone is a candidate when there is no P or
left(d) <= alone_tokens. It wins when it costs no more than the best pair.

The prices are computed with numpy, in a fixed small number of operations for any number of workers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from router.options import PolicyWeights
from router.placement.fleet_table import Floats, Integers, WorkerArrays
from router.placement.policy import Choice, PlacementRequest, Policy, RoleCandidates


class KVPolicy(Policy):
    """Chooses the pair, or the D alone, that costs least."""

    def __init__(self, weights: PolicyWeights, alone_tokens: int, chance: random.Random) -> None:
        super().__init__(weights, alone_tokens, chance)
        self._shared_hosts: _SharedHosts | None = None

    def choose(self, request: PlacementRequest, prefill: RoleCandidates, decode: RoleCandidates) -> Choice:
        costs = self._costs(request, prefill, decode)
        alone_row, alone_cost = None, np.inf
        if "alone" in costs:
            alone_row = self.cheapest(costs["alone"])
            alone_cost = costs["alone"][alone_row]
        if "prefill" in costs:
            p, d, cost = self._best_pair(prefill.workers, decode.workers, costs)
            if alone_row is None or cost < alone_cost:
                return Choice(request, prefill, decode, p, d)
        assert alone_row is not None
        return Choice(request, prefill, decode, None, alone_row)

    def costs(self, choice: Choice) -> dict[str, Floats]:
        """`prefill`: cost_P. `decode`: load_D + move to another host. `alone`, where a D may do it alone."""
        return self._costs(choice.request, choice.prefill, choice.decode)

    def _costs(
        self, request: PlacementRequest, prefill: RoleCandidates, decode: RoleCandidates
    ) -> dict[str, Floats]:
        left, load = self.left(request, decode), self._load(request, decode)
        costs = {}
        alone = self._alone(left.take(decode.workers.slots), decode.workers, load, len(prefill.workers) == 0)
        if alone is not None:
            costs["alone"] = alone
        if len(prefill.workers):
            held = decode.matches.pages.take(decode.workers.slots) * np.float64(decode.page_tokens)
            costs["move"] = (request.prompt_tokens - held) * self.weights.transfer
            costs["decode"] = load + costs["move"]
            costs["prefill"] = self._prefill(left.take(prefill.workers.slots), prefill)
        return costs

    def _prefill(self, left: Floats, prefill: RoleCandidates) -> Floats:
        """cost_P by row."""
        weights, queued = self.weights, prefill.workers.queued
        cost: Floats = queued - queued[queued.argmin()]  # a call of min() takes four times as long
        cost *= cost / weights.queue_objective
        cost += queued
        cost *= weights.prefill_queue
        cost += left * weights.prefill_left
        if prefill.last is not None:
            cost[prefill.last] -= weights.session
        return cost

    def _load(self, request: PlacementRequest, decode: RoleCandidates) -> Floats:
        """load_D by row."""
        weights, workers = self.weights, decode.workers
        lacking = np.maximum(request.prompt_tokens + request.output_tokens - workers.spare, 0.0)
        load = workers.requests * weights.decode_load
        load += workers.context * weights.decode_context
        load += lacking * weights.decode_full
        if decode.last is not None:
            load[decode.last] -= weights.session
        return load

    def _alone(self, left: Floats, decode: WorkerArrays, load: Floats, must: bool) -> Floats | None:
        """`alone` by row, infinite for those that may not; None when none may."""
        weights = self.weights
        if not must and left[left.argmin()] > self.alone_tokens:
            return None
        alone = load + weights.prefill_queue * decode.queued + weights.decode_prefill * left
        if not must:
            alone[left > self.alone_tokens] = np.inf
        return alone

    def _best_pair(
        self, prefill: WorkerArrays, decode: WorkerArrays, costs: dict[str, Floats]
    ) -> tuple[int, int, float]:
        """The cheapest (P row, D row), and their cost.

        First D, at its cost with the P that suits it best; then P for that D. The two depend on each other
        only by their hosts, so no matrix of all pairs is needed.
        """
        cost_p, cost_d = costs["prefill"], costs["decode"]
        hosts = self._shared_hosts
        if hosts is None or not hosts.are_of(prefill, decode):
            hosts = self._shared_hosts = _shared_hosts(prefill, decode, self.weights.same_host)
        if not hosts.any:
            p, d = self.cheapest(cost_p), self.cheapest(cost_d)
            return p, d, float(cost_p[p] + cost_d[d])
        spared = costs["move"] * hosts.spared
        pairs = np.minimum.reduceat(cost_p[hosts.prefill], hosts.starts)[hosts.host]
        pairs -= spared
        np.minimum(pairs, cost_p[cost_p.argmin()], out=pairs)
        pairs += cost_d
        d = self.cheapest(pairs)
        if hosts.spared[d]:
            cost_p = cost_p - spared[d] * (prefill.hosts == decode.hosts[d])
        p = self.cheapest(cost_p)
        return p, d, float(cost_p[p] + cost_d[d])


@dataclass(frozen=True, slots=True)
class _SharedHosts:
    """Which D share a host with which P. Kept between choices: it changes only with the fleet's members."""

    prefill_hosts: Integers  # of these rows
    decode_hosts: Integers
    any: bool  # some host has both
    prefill: npt.NDArray[np.intp]  # P rows, host by host
    starts: npt.NDArray[np.intp]  # where in `prefill` each host begins
    host: npt.NDArray[np.intp]  # by D row: an index of `starts`; 0, without meaning, where nothing is spared
    spared: Floats  # by D row: the part of `move` that a P on the same host spares; 0 where none is there

    def are_of(self, prefill: WorkerArrays, decode: WorkerArrays) -> bool:
        return self.prefill_hosts is prefill.hosts and self.decode_hosts is decode.hosts


def _shared_hosts(prefill: WorkerArrays, decode: WorkerArrays, same_host: float) -> _SharedHosts:
    order = prefill.hosts.argsort(kind="stable")
    hosts, starts = np.unique(prefill.hosts[order], return_index=True)
    shared = np.isin(decode.hosts, hosts)
    host = np.searchsorted(hosts, decode.hosts) * shared
    spared = np.multiply(shared, 1.0 - same_host, dtype=np.float64)
    return _SharedHosts(prefill.hosts, decode.hosts, bool(shared.any()), order, starts, host, spared)
