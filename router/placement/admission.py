"""Admission: who may have workers now, who waits in the router, and who is told to come back later.

    arrives ──offer──> waits ──admit──> runs ──leave──> over
       |                 |
       | Overloaded      +── overdue (Overloaded), leave (the client has gone)

At most `max_in_flight` rooms run; at most `max_queued` wait for that, or for a fleet that is saturated.
Their turns are fair between tenants (fair_queue.py). What would miss `max_ttft_s` is refused at arrival,
where it has cost nothing yet (prediction.py). All of it follows from the loads of now: nothing latches.

A room that starts again after a worker's failure is still running here: it never queues again and is never
refused. Pure: time is passed in (seconds, any origin), so the router and the simulator share it. Belongs to
one thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import InvalidRequest, Overloaded
from router.options import AdmissionOptions
from router.placement.fair_queue import Ahead, FairQueue
from router.placement.fleet import Account
from router.placement.placer import Choice, Placer
from router.placement.policy import Ask
from router.placement.prediction import Prediction, Predictor
from wire.records import Role, WorkerLoad

_LONGEST_RETRY_S = 60.0
_NOBODY = Ahead(0.0, 0.0)
_SILENT = WorkerLoad()


@dataclass(frozen=True, slots=True)
class Judged:
    """Why a request was not refused: what was predicted for the workers that it would get now."""

    choice: Choice
    prediction: Prediction


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
        self._asks: dict[int, Ask] = {}  # of rooms that wait
        self._running: dict[int, _Running] = {}
        self._had_memory = ""  # the last decode worker that had some

    @property
    def queued(self) -> int:
        """Rooms that wait."""
        return len(self._queue)

    @property
    def in_flight(self) -> int:
        """Rooms that run."""
        return len(self._running)

    # -- at arrival ----------------------------------------------------------------------------

    def check(self, rooms: int) -> None:
        """Is there a place for so many rooms of one request? Cheap: done before a prompt is hashed.

        Raises InvalidRequest when there never is, Overloaded when there is none now.
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
                f"{running} of {options.max_in_flight} places {where}are taken", self._until_served()
            )

    def judge(self, ask: Ask, now: float) -> Judged | None:
        """Would a request, the first room of it, have its first token in time?

        Raises Overloaded when not, with the time after which it would. None: nobody can tell, or wants to.
        A prompt that takes longer than `max_ttft_s` on an idle worker is judged by its wait alone.
        """
        limit = self._options.max_ttft_s
        if limit is None:
            return None
        choice = self._placer.choose(ask, now)
        prediction = self.predict(ask, choice) if choice is not None else None
        if choice is None or prediction is None:
            return None
        own_s = prediction.compute_s if prediction.compute_s <= limit else 0.0
        late_s = prediction.wait_s + own_s - limit
        if late_s > 0:
            raise Overloaded(
                f"the first token is expected after {prediction.ttft_s:.1f} s, and {limit:g} s are allowed",
                min(late_s, _LONGEST_RETRY_S),
            )
        return Judged(choice, prediction)

    def enqueue(self, room: int, ask: Ask, now: float) -> None:
        """A new room waits for its turn, which may be now: `admit` says."""
        until = now + self._options.max_queue_s
        self._queue.push(room, ask.tenant, ask.priority, ask.prompt_tokens, until)
        self._asks[room] = ask

    def offer(self, room: int, ask: Ask, now: float) -> Judged | None:
        """All three for a request of one room."""
        self.check(1)
        judged = self.judge(ask, now)
        self.enqueue(room, ask, now)
        return judged

    def predict(self, ask: Ask, choice: Choice, admitted: bool = False) -> Prediction | None:
        """The time to first token of a prompt that arrives, or was admitted, now; None: nobody can tell."""
        if admitted:
            return self._predictor.predict(ask, choice, _NOBODY, 0.0)
        ahead = self._queue.ahead(ask.tenant, ask.priority)
        return self._predictor.predict(ask, choice, ahead, self._rooms_to_end(ahead.rooms, ask))

    # -- turns ---------------------------------------------------------------------------------

    def admit(self, now: float) -> int | None:
        """The room that may have workers now. Place it before asking for the next one."""
        head = self._queue.head()
        if head is None or len(self._running) >= self._options.max_in_flight:
            return None
        if self._gated and self._saturated(self._asks[head.room], now):
            return None
        waiting = self._queue.pop()
        del self._asks[waiting.room]
        self._running[waiting.room] = _Running(waiting.tenant, waiting.tokens)
        return waiting.room

    def overdue(self, now: float) -> list[tuple[int, Overloaded]]:
        """Rooms that have waited too long. They are over."""
        late = []
        for waiting in self._queue:
            if waiting.until > now:
                break  # they came in this order
            late.append(waiting.room)
        for room in late:
            self.leave(room)
        message = f"no worker was free within {self._options.max_queue_s:g} s"
        return [(room, Overloaded(message, self._until_served())) for room in late]

    def placed(self, room: int, prefill_tokens: int) -> None:
        """An admitted room's prompt costs its workers only so much: the rest was cached."""
        running = self._running.get(room)
        if running is not None and prefill_tokens < running.input_tokens:
            self._queue.charge(running.tenant, prefill_tokens - running.input_tokens, 0)
            running.input_tokens = prefill_tokens

    def produced(self, room: int, tokens: int) -> None:
        """A room has so much output by now. May be said as seldom as at its end."""
        running = self._running.get(room)
        if running is not None and tokens > running.output_tokens:
            self._queue.charge(running.tenant, 0, tokens - running.output_tokens)
            running.output_tokens = tokens

    def leave(self, room: int) -> None:
        """The room is over, whether it waited or ran. Repeats change nothing."""
        running = self._running.pop(room, None)
        if running is not None:
            self._queue.over(running.tenant)
        elif room in self._queue:
            self._queue.remove(room)
            del self._asks[room]

    # -- inside --------------------------------------------------------------------------------

    @property
    def _gated(self) -> bool:
        """Does a saturated fleet make rooms wait here?"""
        options = self._options
        return options.max_queued > 0 and (
            options.queue_prefill_tokens is not None or options.queue_decode_full
        )

    def _saturated(self, ask: Ask, now: float) -> bool:
        fleet, most = self._placer.fleet, self._options.queue_prefill_tokens
        if most is not None:
            candidates = fleet.candidates(now)
            rows = candidates.prefill if len(candidates.prefill) else candidates.decode
            if len(rows) and rows.queued.min() > most:
                return True
        return self._options.queue_decode_full and self._decode_full(ask)

    def _decode_full(self, ask: Ask | None) -> bool:
        """No decode worker has memory and a row for the room."""
        need = ask.prompt_tokens + int(ask.output_tokens) if ask is not None else 1
        last = self._placer.fleet.account(self._had_memory)
        if last is not None and _has_memory(last, need):  # as often: the others need not be asked
            return False
        full = False
        for one in self._placer.fleet.accounts():
            if one.record.role is Role.DECODE and not one.record.draining:
                if _has_memory(one, need):
                    self._had_memory = one.record.id
                    return False
                full = True
        return full

    def _rooms_to_end(self, ahead: float, ask: Ask | None) -> float:
        """How many rooms must end before one with so many ahead of it may run."""
        if self._options.max_queued and self._options.queue_decode_full and self._decode_full(ask):
            return ahead + 1
        return max(0.0, len(self._running) + ahead + 1 - self._options.max_in_flight)

    def _until_served(self) -> float:
        """When a room at the end of the queue would have its turn."""
        seconds = self._predictor.queue_s(self._queue.tokens, self._rooms_to_end(len(self._queue), None))
        return min(max(seconds, self._options.retry_after_s), _LONGEST_RETRY_S)


def _has_memory(decode: Account, need: int) -> bool:
    """One that is idle has, whatever it last said."""
    if decode.record.draining:
        return False
    return decode.record.load == _SILENT or decode.requests() == 0 or decode.fits(need)
