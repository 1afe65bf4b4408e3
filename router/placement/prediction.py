"""Predicts the time to first token of a prompt from what its workers last reported.

    ttft = queue + max(turn, memory) + compute

    queue     time in the router's queue (admission.py)
    turn      until P has computed what is queued on it
    memory    until D has memory and a row; the router holds P's work back until then
    compute   the tokens that P does not hold

`memory` is about D's load when the prefill will be done, not now. Let D have R requests of C tokens each, M
the mean output and s the time of a decode step. One request ends every M s / R seconds and frees C + M / 2
tokens; until then all requests grow by R / s tokens a second. So D's memory comes back at
R (C - M / 2) / (M s) tokens a second, or at R C / (2 M s) while requests are young. Pure: no clock. Units are
seconds and tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.placement.fair_queue import Ahead
from router.placement.load_estimate import WorkerLoadEstimate
from router.placement.placer import Placer
from router.placement.policy import Choice, PlacementRequest
from wire.records import Role


@dataclass(frozen=True, slots=True)
class Prediction:
    """The parts of a time to first token, in seconds."""

    queue_s: float
    turn_s: float
    memory_s: float
    compute_s: float

    @property
    def wait_s(self) -> float:
        """The part that other requests cause."""
        return self.queue_s + max(self.turn_s, self.memory_s)

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token."""
        return self.wait_s + self.compute_s


class Predictor:
    """Predicts from a placer's fleet. What no worker has reported yet takes no time."""

    def __init__(self, placer: Placer) -> None:
        self._placer = placer

    def predict(self, choice: Choice, ahead: Ahead, rooms_to_end: float) -> Prediction | None:
        """Predict for a choice that was made now and is not placed yet.

        `ahead` is what goes before it in the router's queue, `rooms_to_end` how many running rooms must end
        before it may leave that queue. Returns None while the worker that would prefill has not reported its
        rate.
        """
        if choice.prefill_row is not None:
            workers, row = choice.prefill.workers, choice.prefill_row
        else:
            workers, row = choice.decode.workers, choice.decode_row
        rate = workers.estimates[row].record.load.prefill_tokens_per_s
        if rate <= 0:
            return None
        request = choice.request
        return Prediction(
            queue_s=self.queue_s(ahead.tokens, rooms_to_end),
            turn_s=float(workers.queued[row]) / rate,
            memory_s=self._memory_s(choice.decode_worker, request),
            compute_s=max(1, request.prompt_tokens - choice.hit_tokens) / rate,
        )

    def queue_s(self, tokens: float, rooms_to_end: float) -> float:
        """Seconds until all prefill workers have computed this many tokens and this many rooms have ended."""
        computed = ended = 0.0
        if tokens > 0:
            rate = self._prefill_rate()
            computed = tokens / rate if rate > 0 else 0.0
        if rooms_to_end > 0:
            ends = sum(self._ends_per_s(one) for one in self._of(Role.DECODE))
            ended = rooms_to_end / ends if ends > 0 else 0.0
        return max(computed, ended)

    # -- inside --------------------------------------------------------------------------------

    def _of(self, role: Role) -> list[WorkerLoadEstimate]:
        estimates = self._placer.fleet.estimates()
        return [one for one in estimates if one.record.role is role and not one.record.draining]

    def _prefill_rate(self) -> float:
        """Tokens per second of all prefill workers. One without a reported rate counts as the mean."""
        workers = self._of(Role.PREFILL) or self._of(Role.DECODE)
        rates = [one.record.load.prefill_tokens_per_s for one in workers]
        known = [rate for rate in rates if rate > 0]
        return sum(known) / len(known) * len(rates) if known else 0.0

    def _ends_per_s(self, decode: WorkerLoadEstimate) -> float:
        load = decode.record.load
        life_s = self._placer.mean_output * load.decode_step_s
        return float(load.running_requests / life_s) if life_s > 0 else 0.0

    def _memory_s(self, decode: WorkerLoadEstimate, request: PlacementRequest) -> float:
        load, ends = decode.record.load, self._ends_per_s(decode)
        if ends <= 0:
            return 0.0
        need = request.prompt_tokens + int(request.output_tokens)
        held = decode.record.total_tokens - load.free_tokens
        lacking = max(
            need - (load.headroom_tokens - decode.promised_tokens),
            # Rooms that wait on D for memory are in no headroom, but in what the routers have assigned.
            decode.context() + need - decode.record.total_tokens,
        )
        rows = decode.promised_rooms + 1 - load.headroom_rows
        mean = held / load.running_requests
        freed = max(mean - self._placer.mean_output / 2, mean / 2, 1.0)  # by one request that ends
        return max(0.0, lacking / (freed * ends), rows / ends)
