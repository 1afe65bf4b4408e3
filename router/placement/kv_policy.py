"""Policy `kv`: prices what is left to compute and to move against load, for P and D together.

In units of "the wait for one queued prompt token" (weights: placement_options.PolicyWeights; h is what a
worker holds, s what that saves when slower tiers are weighted, q the prompt tokens queued on it):

    left(w)    = max(1, prompt - s(w))
    cost_P(p)  = prefill_queue (q(p) + (q(p) - min q)^2 / queue_objective) + prefill_left left(p)
    load_D(d)  = decode_load requests(d) + decode_context context(d) + decode_full lacking(d)
    move(p, d) = price(p, d) (prompt - h(d))
    pair(p, d) = cost_P(p) + load_D(d) + move(p, d)
    alone(d)   = load_D(d) + prefill_queue q(d) + decode_prefill left(d)

Where workers fetch from each other, cost_P(p) and alone(d) are less by what the best fetch saves
(peer_fetch.py), and D alone is a candidate when little is left after it.

`price` is `transfer`, times `same_host`, `same_machine` or `same_rack` where p and d are that near, until
transfers between such workers have been measured (transfer_rates.py). `lacking` is how much of prompt +
expected output exceeds the memory that D's requests leave. cost_P and load_D are reduced by `session` for the
workers of the session's last request. Only what a queue has more than the shortest is priced convex. So a
worker with a hot prefix is left once that excess nears the objective, and the prefix gets a second holder.
(If the whole queue were convex, long queues on all workers would make hits worth little, and misses add work
for all workers.) D alone is a candidate when there is no P, when left(d) <= alone_tokens, or while every P
has more than `decode_relief` tokens queued. It wins when it costs no more than the best pair.

The prices are computed with numpy, in a fixed small number of operations for any number of workers.
"""

from __future__ import annotations

import random

import numpy as np

from router.placement.fleet_table import Floats, WorkerArrays
from router.placement.peer_fetch import Offers, PeerFetch
from router.placement.policy import Choice, PlacementRequest, Policy, RoleCandidates
from router.placement.transfer_table import TransferTable, transfer_table
from router.placement_options import PolicyWeights


class KVPolicy(Policy):
    """Chooses the pair, or the D alone, that costs least."""

    def __init__(
        self,
        weights: PolicyWeights,
        alone_tokens: int,
        chance: random.Random,
        peers: PeerFetch | None = None,
    ) -> None:
        super().__init__(weights, alone_tokens, chance, peers)
        self._table: TransferTable | None = None

    def choose(self, request: PlacementRequest, prefill: RoleCandidates, decode: RoleCandidates) -> Choice:
        offers = self.offers(request, prefill, decode)
        costs = self._costs(request, prefill, decode, offers)
        alone_row, alone_cost = None, np.inf
        if "alone" in costs:
            alone_row = self.cheapest(costs["alone"])
            alone_cost = costs["alone"][alone_row]
        if "prefill" in costs:
            p, d, cost = self._best_pair(prefill.workers, decode.workers, costs)
            if alone_row is None or cost < alone_cost:
                return Choice(request, prefill, decode, p, d, offers.fetch(p) if offers else None)
        assert alone_row is not None
        fetch = offers.fetch(len(prefill.workers) + alone_row) if offers else None
        return Choice(request, prefill, decode, None, alone_row, fetch)

    def costs(self, choice: Choice) -> dict[str, Floats]:
        """`prefill`: cost_P. `decode`: load_D + move from the nearest P. `alone`: where D may do it alone."""
        offers = self.offers(choice.request, choice.prefill, choice.decode)
        costs = self._costs(choice.request, choice.prefill, choice.decode, offers)
        if "missing" in costs:
            table = self._transfer_table(choice.prefill.workers, choice.decode.workers)
            costs["decode"] = costs["load"] + table.cheapest(
                np.zeros(len(table.prefill_names)), costs["missing"]
            )
        return costs

    def _costs(
        self,
        request: PlacementRequest,
        prefill: RoleCandidates,
        decode: RoleCandidates,
        offers: Offers | None,
    ) -> dict[str, Floats]:
        left, load, split = self.left(request, decode), self._load(request, decode), len(prefill.workers)
        costs = {"load": load}
        most = self._alone_most(prefill.workers)
        alone = self._alone(left.take(decode.workers.slots), decode.workers, load, most, offers)
        if alone is not None:
            costs["alone"] = alone
        if split:
            held = decode.matches.pages.take(decode.workers.slots) * np.float64(decode.page_tokens)
            costs["missing"] = request.prompt_tokens - held
            costs["prefill"] = self._prefill(left.take(prefill.workers.slots), prefill)
            if offers is not None:
                costs["prefill"] -= offers.saved[:split]
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

    def _alone_most(self, prefill: WorkerArrays) -> float:
        """The most tokens that D may have to compute to be a candidate alone."""
        queued = prefill.queued
        if len(queued) == 0 or queued[queued.argmin()] > self.weights.decode_relief:
            return np.inf
        return self.alone_tokens

    def _alone(
        self, left: Floats, decode: WorkerArrays, load: Floats, most: float, offers: Offers | None
    ) -> Floats | None:
        """`alone` by row, infinite for those that may not; None when none may."""
        weights, computed, saved = self.weights, left, None
        if offers is not None:
            saved = offers.saved[-len(left) :]
            computed = np.where(saved > 0, left - offers.tokens[-len(left) :], left)
        if computed[computed.argmin()] > most:
            return None
        alone = load + weights.prefill_queue * decode.queued + weights.decode_prefill * left
        if saved is not None:
            alone -= saved
        alone[computed > most] = np.inf
        return alone

    def _best_pair(
        self, prefill: WorkerArrays, decode: WorkerArrays, costs: dict[str, Floats]
    ) -> tuple[int, int, float]:
        """The cheapest (P row, D row), and their cost.

        First D, at its cost with the P that suits it best; then P for that D.
        """
        cost_p, load, missing = costs["prefill"], costs["load"], costs["missing"]
        table = self._transfer_table(prefill, decode)
        uniform = table.uniform
        if uniform is not None:
            cost_d = uniform * missing
            cost_d += load
            p, d = self.cheapest(cost_p), self.cheapest(cost_d)
            return p, d, float(cost_p[p] + cost_d[d])
        d = self.cheapest(table.cheapest(cost_p, missing) + load)
        toward = table.prices_to(d) * missing[d]
        toward += cost_p
        p = self.cheapest(toward)
        return p, d, float(toward[p] + load[d])

    def _transfer_table(self, prefill: WorkerArrays, decode: WorkerArrays) -> TransferTable:
        """Kept between choices: it changes with the fleet's members, and at most once a second with rates."""
        table = self._table
        if table is None or not table.is_of(prefill, decode, self.transfers):
            table = self._table = transfer_table(prefill, decode, self.transfers, self.weights)
        return table
