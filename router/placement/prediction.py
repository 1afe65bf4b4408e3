"""How long a prompt's first token will take, from what its workers last reported.

    ttft = queue + max(turn, memory) + compute

    queue     in the router, until what is ahead of it there has gone (admission.py)
    turn      until P has computed what is queued on it
    memory    until D has memory and a row: P's work is of no use before, and the router holds it back
    compute   of the tokens that P does not hold

`memory` is about D's load when the prefill will be done, not now. Of its R requests, of C tokens each now,
one ends every M s / R seconds (M: mean output, s: time of a decode step) and gives back C + M / 2 tokens;
until then all grow by R / s tokens a second. So D's memory comes back at R (C - M / 2) / (M s) tokens a
second, or at R C / (2 M s) where requests are young. Pure; seconds and tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.placement.fair_queue import Ahead
from router.placement.fleet import Account
from router.placement.placer import Choice, Placer
from router.placement.policy import Ask
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
        """Of it, what other requests cost."""
        return self.queue_s + max(self.turn_s, self.memory_s)

    @property
    def ttft_s(self) -> float:
        """Arrival to first token."""
        return self.wait_s + self.compute_s


class Predictor:
    """Predicts from a placer's fleet. What no worker has reported yet costs nothing."""

    def __init__(self, placer: Placer) -> None:
        self._placer = placer

    def predict(self, ask: Ask, choice: Choice, ahead: Ahead, rooms_to_end: float) -> Prediction | None:
        """For a prompt and the workers chosen for it now, before anything is booked.

        `ahead` of it in the router's queue; `rooms_to_end` before it may leave. None while the worker that
        would prefill has not said how fast it is.
        """
        if choice.picked.prefill is not None:
            side, row = choice.prefill_side, choice.picked.prefill
        else:
            side, row = choice.decode_side, choice.picked.decode
        account = self._placer.fleet.account(side.rows.names[row])
        decode = self._placer.fleet.account(choice.decode.id)
        if account is None or decode is None or account.record.load.prefill_tokens_per_s <= 0:
            return None
        rate = account.record.load.prefill_tokens_per_s
        return Prediction(
            queue_s=self.queue_s(ahead.tokens, rooms_to_end),
            turn_s=float(side.rows.queued[row]) / rate,
            memory_s=self._memory_s(decode, ask),
            compute_s=max(1, ask.prompt_tokens - choice.hit_tokens) / rate,
        )

    def queue_s(self, tokens: float, rooms_to_end: float) -> float:
        """Until all prefill workers have computed so much, and so many rooms have ended."""
        computed = ended = 0.0
        if tokens > 0:
            rate = self._prefill_rate()
            computed = tokens / rate if rate > 0 else 0.0
        if rooms_to_end > 0:
            ends = sum(self._ends_per_s(one) for one in self._of(Role.DECODE))
            ended = rooms_to_end / ends if ends > 0 else 0.0
        return max(computed, ended)

    # -- inside --------------------------------------------------------------------------------

    def _of(self, role: Role) -> list[Account]:
        accounts = self._placer.fleet.accounts()
        return [one for one in accounts if one.record.role is role and not one.record.draining]

    def _prefill_rate(self) -> float:
        """Of all prefill workers; one that has not said its rate counts as the mean of the others."""
        workers = self._of(Role.PREFILL) or self._of(Role.DECODE)
        rates = [one.record.load.prefill_tokens_per_s for one in workers]
        known = [rate for rate in rates if rate > 0]
        return sum(known) / len(known) * len(rates) if known else 0.0

    def _ends_per_s(self, decode: Account) -> float:
        load = decode.record.load
        life_s = self._placer.mean_output * load.decode_step_s
        return float(load.running_requests / life_s) if life_s > 0 else 0.0

    def _memory_s(self, decode: Account, ask: Ask) -> float:
        load, ends = decode.record.load, self._ends_per_s(decode)
        if ends <= 0:
            return 0.0
        need, held = ask.prompt_tokens + int(ask.output_tokens), decode.record.total_tokens - load.free_tokens
        own, peers = decode.own, decode.peers
        lacking = max(
            need - (load.headroom_tokens - own.promised_tokens - peers.promised_tokens),
            # Rooms that wait on D for memory are in no headroom; the routers know of them.
            decode.context() + need - decode.record.total_tokens,
        )
        rows = own.promised_rooms + peers.promised_rooms + 1 - load.headroom_rows
        mean = held / load.running_requests
        freed = max(mean - self._placer.mean_output / 2, mean / 2, 1.0)  # by one that ends
        return max(0.0, lacking / (freed * ends), rows / ends)
