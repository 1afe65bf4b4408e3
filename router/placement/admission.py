"""Admission: decides which rooms may have workers now, which wait in the router, and which are refused.

    arrives ──enqueue──> waits ──admit──> runs ──leave──> over
       |                   |
       | Overloaded        +── overdue (Overloaded), leave (the client has gone)

At most `max_in_flight` rooms run. At most `max_queued` wait, for a place among those or while the fleet is
saturated. Turns are fair between tenants (fair_queue.py). A request that would miss `max_ttft_s` is refused
at arrival, before it has cost anything (prediction.py). Every decision follows from the current loads:
nothing latches.

A room that starts again after a worker's failure is still running here: it never queues again and is never
refused. Pure: time is passed in (seconds, any origin), so the router and the simulator share it. Belongs to
one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.errors import InvalidRequest, Overloaded
from router.placement.fair_queue import Ahead, FairQueue
from router.placement.placer import Placer
from router.placement.policy import Choice, PlacementRequest
from router.placement.prediction import Prediction, Predictor
from router.placement_options import AdmissionOptions
from wire.records import Role

_LONGEST_RETRY_S = 60.0
_NOBODY = Ahead(0.0, 0.0)


@dataclass(slots=True)
class _Running:
    tenant: str
    input_tokens: int  # charged
    output_tokens: int = 0  # charged


class Admission:
    """The rooms of a router, waiting and running."""

    def __init__(self, options: AdmissionOptions, placer: Placer) -> None:
        self._options = options
        self._placer = placer
        self._predictor = Predictor(placer)
        self._queue = FairQueue(options.tenant_weights)
        self._running: dict[int, _Running] = {}

    @property
    def queued(self) -> int:
        """Rooms that wait."""
        return len(self._queue)

    @property
    def in_flight(self) -> int:
        """Rooms that run."""
        return len(self._running)

    def waiting(self) -> dict[str, float]:
        """Rooms that wait while all decode workers are full, divided among these, for scaling. Nothing is
        told of rooms that wait for something else: prefill workers know their own queues."""
        if not len(self._queue) or not self._decode_full():
            return {}
        active = self._placer.fleet.active()
        decode = [one.record.id for one in active if one.record.role is Role.DECODE]
        return dict.fromkeys(decode, len(self._queue) / len(decode))

    # -- at arrival ----------------------------------------------------------------------------

    def check(self, rooms: int) -> None:
        """Check that there is a place for this many rooms of one request, before its prompt is hashed.

        Raises InvalidRequest when there can never be one, Overloaded when there is none now.
        """
        options, running, queued = self._options, len(self._running), len(self._queue)
        most = min(options.max_in_flight, options.max_queued) if self._gated else options.max_in_flight
        if rooms > most:
            raise InvalidRequest(f"{rooms} choices are more than the {most} that may be taken at once")
        # Whether a room leaves a gated queue at once is known only when its turn comes.
        at_once = 0 if queued or self._gated else options.max_in_flight - running
        if queued + rooms - min(rooms, at_once) > options.max_queued:
            where = f"and {queued} of {options.max_queued} in the queue " if options.max_queued else ""
            raise Overloaded(
                f"{running} of {options.max_in_flight} places {where}are taken",
                self._until_served(),
                "places",
            )

    def judge(self, request: PlacementRequest, now: float) -> tuple[Choice, Prediction] | None:
        """Predict the time to first token of a request's first room.

        Returns the workers that it would get now and the prediction for them, or None when there is no limit
        or no prediction. Raises Overloaded when the prediction is beyond the limit, with the time after which
        it would not be. A prompt that takes longer than `max_ttft_s` on an idle worker is judged by its wait
        alone.
        """
        limit = self._options.max_ttft_s
        if limit is None:
            return None
        choice = self._placer.choose(request, now)
        prediction = self.predict(choice) if choice is not None else None
        if choice is None or prediction is None:
            return None
        own_s = prediction.compute_s if prediction.compute_s <= limit else 0.0
        late_s = prediction.wait_s + own_s - limit
        if late_s > 0:
            raise Overloaded(
                f"the first token is expected after {prediction.ttft_s:.1f} s, and {limit:g} s are allowed",
                min(late_s, _LONGEST_RETRY_S),
                "ttft",
            )
        return choice, prediction

    def enqueue(self, room: int, request: PlacementRequest, now: float) -> None:
        """Queue a new room. `admit` returns it when its turn comes, which may be now."""
        until = now + self._options.max_queue_s
        self._queue.push(room, request.tenant, request.priority, request.prompt_tokens, until)

    def predict(self, choice: Choice, admitted: bool = False) -> Prediction | None:
        """Predict the time to first token of a prompt that arrives now, or that was `admitted` now.

        Returns None while the worker that would prefill has not reported its rate.
        """
        if admitted:
            return self._predictor.predict(choice, _NOBODY, 0.0)
        request = choice.request
        ahead = self._queue.ahead(request.tenant, request.priority)
        return self._predictor.predict(choice, ahead, self._rooms_to_end(ahead.rooms))

    # -- turns ---------------------------------------------------------------------------------

    def admit(self, now: float) -> int | None:
        """Return the room that may have workers now. Place it before you ask for the next one."""
        head = self._queue.head()
        if head is None or len(self._running) >= self._options.max_in_flight:
            return None
        if self._gated and self._saturated(now):
            return None
        waiting = self._queue.pop()
        self._running[waiting.room] = _Running(waiting.tenant, waiting.tokens)
        return waiting.room

    def overdue(
        self, now: float, is_accepted: Callable[[int], bool] = lambda _: False
    ) -> list[tuple[int, Overloaded]]:
        """End the rooms that have waited too long, and return them with their errors.

        Rooms of an accepted request stay: other choices of it run or have ended, and would be lost with
        them.
        """
        late = []
        for waiting in self._queue:
            if waiting.until > now:
                break  # rooms are in the order of arrival
            if not is_accepted(waiting.room):
                late.append(waiting.room)
        for room in late:
            self.leave(room)
        message = f"no worker was free within {self._options.max_queue_s:g} s"
        return [(room, Overloaded(message, self._until_served())) for room in late]

    def placed(self, room: int, prefill_tokens: int) -> None:
        """An admitted room's prompt has only this many tokens to compute; the rest is cached."""
        running = self._running.get(room)
        if running is not None and prefill_tokens < running.input_tokens:
            self._queue.charge(running.tenant, prefill_tokens - running.input_tokens, 0)
            running.input_tokens = prefill_tokens

    def produced(self, room: int, tokens: int) -> None:
        """A room has this much output now. May be called as rarely as once, at its end."""
        running = self._running.get(room)
        if running is not None and tokens > running.output_tokens:
            self._queue.charge(running.tenant, 0, tokens - running.output_tokens)
            running.output_tokens = tokens

    def leave(self, room: int) -> None:
        """The room is over, whether it waited or ran. Repeated calls change nothing."""
        running = self._running.pop(room, None)
        if running is not None:
            self._queue.over(running.tenant)
        elif room in self._queue:
            self._queue.remove(room)

    # -- inside --------------------------------------------------------------------------------

    @property
    def _gated(self) -> bool:
        """Whether rooms wait here while the fleet is saturated."""
        options = self._options
        return options.max_queued > 0 and (
            options.queue_prefill_tokens is not None or options.queue_decode_full
        )

    def _saturated(self, now: float) -> bool:
        most = self._options.queue_prefill_tokens
        if most is not None:
            prefill, decode = self._placer.fleet.candidates(now)
            workers = prefill if len(prefill) else decode
            if len(workers) and workers.queued.min() > most:
                return True
        return self._options.queue_decode_full and self._decode_full()

    def _decode_full(self) -> bool:
        """Whether there are decode workers and none has memory and a row left.

        A suspected worker is none: if there is no other, rooms are accepted and wait for one to appear. The
        size of the next room does not count: shorter ones would keep decode busy until a long one is overdue.
        On a worker it holds its place, and the worker reports no headroom until it has got its memory.
        """
        full = False
        for one in self._placer.fleet.active():  # 0.4 us per full worker
            if one.record.role is Role.DECODE:
                if one.can_start(1) and not one.has_backlog():
                    return False
                full = True
        return full

    def _rooms_to_end(self, ahead: float) -> float:
        """How many rooms must end before a room with this many ahead of it may run."""
        if self._options.max_queued and self._options.queue_decode_full and self._decode_full():
            return ahead + 1
        return max(0.0, len(self._running) + ahead + 1 - self._options.max_in_flight)

    def _until_served(self) -> float:
        """Seconds until a room at the end of the queue would have its turn."""
        seconds = self._predictor.queue_s(self._queue.tokens, self._rooms_to_end(len(self._queue)))
        return min(max(seconds, self._options.retry_after_s), _LONGEST_RETRY_S)
