"""Policy `kv`: prices what is left to compute and to move against load, for P and D together.

In units of "one prompt token computed by an idle P" (weights: options.PolicyWeights; h is what a worker
holds, s what that saves when slower tiers are weighted, q the prompt tokens queued on it):

    left(w)    = max(1, prompt - s(w))
    cost_P(p)  = prefill_queue q(p) (1 + q(p) / queue_objective) + prefill_left left(p)
    load_D(d)  = decode_load requests(d) + decode_context context(d) + decode_full lacking(d)
    move(p, d) = transfer (prompt - h(d)), times same_host where p and d share a host
    pair(p, d) = cost_P(p) + load_D(d) + move(p, d)
    alone(d)   = load_D(d) + prefill_queue q(d) + decode_prefill left(d)

`lacking` is how much of prompt + expected output exceeds the memory that D's requests leave. The queue's
price is convex so that a worker with a hot prefix is left once its queue nears the objective: the prefix then
gets a second holder. D alone is a candidate when there is no P or left(d) <= alone_tokens; it wins when it
costs no more than the best pair.
"""

from __future__ import annotations

import numpy as np

from router.fleet import Floats
from router.policy import Ask, Picked, Policy, Side


class KVPolicy(Policy):
    """See the module."""

    def pick(self, ask: Ask, prefill: Side, decode: Side) -> Picked:
        """See Policy."""
        weights, prompt = self.weights, ask.prompt_tokens
        left_d = decode.left(prompt)
        load = self._load(ask, decode)
        costs = {"load": load}
        best_alone = self._alone(decode, left_d, load, costs, must=len(prefill.rows) == 0)
        if len(prefill.rows) == 0:
            assert best_alone is not None
            return Picked(best_alone, None, costs)
        queued = prefill.rows.queued
        cost_p = weights.prefill_queue * queued * (1.0 + queued / weights.queue_objective)
        cost_p += weights.prefill_left * prefill.left(prompt)
        move = weights.transfer * np.maximum(0.0, prompt - decode.held)
        costs["prefill"], costs["decode"] = cost_p, load + move
        p, d, cost = self._best_pair(prefill, decode, cost_p, load, move)
        if best_alone is not None and costs["alone"][best_alone] <= cost:
            return Picked(best_alone, None, costs)
        return Picked(d, p, costs)

    def _load(self, ask: Ask, decode: Side) -> Floats:
        weights, rows = self.weights, decode.rows
        need = ask.prompt_tokens + ask.output_tokens
        lacking = np.maximum(0.0, rows.context + need - rows.capacity)
        return (
            weights.decode_load * rows.requests
            + weights.decode_context * rows.context
            + weights.decode_full * lacking
        )

    def _alone(
        self, decode: Side, left: Floats, load: Floats, costs: dict[str, Floats], must: bool
    ) -> int | None:
        """The best decode worker to do it alone; None when none may."""
        may = left <= self.alone_tokens
        if not must and not may.any():
            return None
        weights = self.weights
        alone = load + weights.prefill_queue * decode.rows.queued + weights.decode_prefill * left
        if not must:
            alone[~may] = np.inf
        costs["alone"] = alone
        return self.cheapest(alone)

    def _best_pair(
        self, prefill: Side, decode: Side, cost_p: Floats, load: Floats, move: Floats
    ) -> tuple[int, int, float]:
        """The cheapest (P row, D row). The two are independent but for the host, so beside the two best only
        each host's own two best can win: no matrix of all pairs."""
        p, d = self.cheapest(cost_p), self.cheapest(load + move)
        hosts_p, hosts_d = prefill.rows.hosts, decode.rows.hosts
        near = self.weights.same_host if hosts_p[p] == hosts_d[d] else 1.0
        cost = float(cost_p[p] + load[d] + near * move[d])
        cheapest_here = np.full(max(hosts_p.max(), hosts_d.max()) + 1, np.inf)
        np.minimum.at(cheapest_here, hosts_p, cost_p)
        shared = cheapest_here[hosts_d] + load + self.weights.same_host * move
        neighbour = int(shared.argmin())
        if shared[neighbour] < cost:
            here = np.flatnonzero(hosts_p == hosts_d[neighbour])
            return int(here[cost_p[here].argmin()]), neighbour, float(shared[neighbour])
        return p, d, cost
