"""Dispatcher: between the mailbox and the rooms. Both belong to the event loop, so there is no lock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from common.errors import Aborted
from router.metrics import RoomMetrics
from router.options import RouterOptions
from router.placement.models import Models
from router.placement.placement import Placement
from router.placement.policy import Choice, PlacementRequest
from router.placement.prediction import Prediction
from router.streams.assignments import Assignments
from router.streams.move import RoomMoves
from router.streams.restarts import RestartCause
from router.streams.room_report import RoomReport
from router.streams.stream import RoomStream
from router.streams.worker_mail import WorkerMail
from router.trace import TraceStore
from wire.messages.any_message import AnyMessage
from wire.messages.base import Receipt, kind_of
from wire.messages.rooms import Rejected, Reserved, RoomStatus, Timeline, Tokens
from wire.records import WorkerRecord
from wire.request import TokenRun
from wire.retransmitter import RetransmitKey
from wire.sockets import Mail

_FAULTS = frozenset({RestartCause.FAILED, RestartCause.FAILED_ALONE, RestartCause.SILENT})
"""Causes that may come from the model. Not a lost worker: all rooms of a host that dies would count."""


class OpenRooms(NamedTuple):
    """The rooms of one request. Implements RequestRooms."""

    dispatcher: Dispatcher
    numbers: list[int]

    def stop(self, reason: str) -> None:
        """End them: no more output is wanted."""
        self.dispatcher.stop(self.numbers, reason)

    def leave(self) -> None:
        """Let go of them; they go on at their workers."""
        for number in self.numbers:
            room = self.dispatcher.rooms.get(number) or self.dispatcher.waiting.get(number)
            if room is not None:
                self.dispatcher.foreign.add(number)
                room.stop(None)


class Dispatcher:
    """All rooms of a router. Implements RoomHost. Belongs to one event loop."""

    def __init__(
        self,
        options: RouterOptions,
        models: Models,
        traces: TraceStore,
        metrics: RoomMetrics,
        send: Callable[[str, AnyMessage], None],
    ) -> None:
        self.assignments = assignments = Assignments(options)
        self.rooms: dict[int, RoomStream] = {}  # admitted
        self.waiting: dict[int, RoomStream] = {}  # in admission's queue
        self.foreign: set[int] = set()  # no longer this router's, or not yet: their output is left alone
        self.mail = WorkerMail(send, options.receipt_timeout_s)
        self.broken_pairs = models.broken_pairs
        self._models = models
        self._traces = traces
        self._metrics = metrics
        for cause in RestartCause:
            metrics.restart_causes.begin(cause)
        self.moves = RoomMoves(
            self.rooms, lambda number: assignments[number].version.placer, self._placement_request,
            self.mail, options, traces, metrics,
        )  # fmt: skip
        self._first_expected: dict[int, float] = {}  # when a room's first token was predicted to come
        self._loop = asyncio.get_running_loop()
        self._admit_due = False
        self._fleet_changes = 0  # of which the rooms have been told

    def open(self, rooms: list[RoomStream], judged: tuple[Choice, Prediction] | None, now: float) -> None:
        """Open the rooms of one request, which are assigned. `judged` is what admission returned for the
        first of them."""
        for room in rooms:
            self.waiting[room.number] = room
            self.assignments[room.number].admission.enqueue(room.number, room.placement_request, now)
        if judged is None:
            self.admit(now)
        else:
            choice, prediction = judged
            self._first_expected[rooms[0].number] = now + prediction.ttft_s
            self.admit(now, (rooms[0].number, choice))

    def admit(self, now: float, chosen: tuple[int, Choice] | None = None) -> None:
        """Give workers to the rooms whose turn it is. `chosen`: a choice made just now for one of them.

        That room gets them if its turn is the first: later, another choice may be better. Rooms that wait for
        a worker get theirs first, if there are other workers than before.
        """
        if self._fleet_changes != (changes := self._models.changes):
            self._fleet_changes, chosen = changes, None
            for room in list(self.rooms.values()):
                room.on_workers_changed(now)
        for version in self._models.versions():
            while (number := version.admission.admit(now)) is not None:
                room = self.rooms[number] = self.waiting.pop(number)
                room.start(now, chosen[1] if chosen is not None and chosen[0] == number else None)
                chosen = None

    def stop(self, rooms: Iterable[int], reason: str) -> None:
        """End rooms of which no more output is wanted."""
        for number in rooms:
            room = self.rooms.get(number) or self.waiting.get(number)
            if room is not None:
                room.stop(reason)

    def tick(self, now: float) -> None:
        """Repeat what is unanswered, wake rooms that are due, acknowledge."""
        for key in self.mail.tick(now):
            self._metrics.swept.inc(1, "message")
            room = self.rooms.get(key.room)
            if room is not None and not self.moves.on_given_up(key, now):
                room.on_given_up(key, now)
        for number, room in list(self.rooms.items()):
            room.tick(now)
            if not room.done:
                self.assignments[number].admission.produced(number, len(room.tokens))
        self.moves.tick(now)
        self._models.tick(now)
        self._end_overdue(now)
        self.admit(now)

    def gone(self, worker: WorkerRecord, why: str, now: float) -> None:
        """A worker is lost, or suspected of it: all rooms that need it start again elsewhere at once.

        `why` completes the sentence "worker x ...". Call `Models.suspect` or `update` before, so that no room
        gets the worker again.
        """
        self.broken_pairs.gone(worker.id)
        self._metrics.pair_transfers.gone(worker.id)
        self.moves.on_worker_gone(worker, now)
        for room in list(self.rooms.values()):
            room.on_worker_gone(worker, why, now)

    def report(self, now: float) -> list[RoomReport]:
        """Where every room is, those that wait for their turn last."""
        return [room.report(now) for rooms in (self.rooms, self.waiting) for room in rooms.values()]

    def close(self) -> None:
        """Give up every room."""
        self.stop([*self.waiting, *self.rooms], "the router is closing")

    def _end_overdue(self, now: float) -> None:
        """Fail the rooms that have waited too long for their turn, or for a worker of their version."""
        for version in self._models.versions():
            for number, error in version.admission.overdue(now, lambda number: self.waiting[number].accepted):
                late = self.waiting.get(number)
                if late is not None:  # else it went with another choice of its request
                    late.fail(error)
        unplaced = [room for room in self.rooms.values() if room.epoch is None]
        for number, gone in self.assignments.overdue(unplaced, now):
            self.rooms[number].fail(gone)

    # -- RoomHost ------------------------------------------------------------------------------

    def place(self, room: RoomStream, avoid: frozenset[str], choice: Choice | None) -> Placement | None:
        """Choose workers, unless that was done, and count the room on them."""
        now, assignment = time.monotonic(), self.assignments[room.number]
        if choice is None:
            assignment.renew(self.rooms)
            choice = assignment.version.placer.choose(self._placement_request(room), now, avoid)
            if choice is None:
                return None
        number, epoch = room.number, room.request.epoch
        if epoch == 0:
            self._expect_first(number, choice, now)
            waited_ns = max(time.time_ns() - room.request.arrived_ns, 0)
            self._metrics.observe_queued(waited_ns / 1e9, assignment.model.name, room.request.tenant)
        placement = assignment.version.placer.place(choice, now)
        assignment.admission.placed(number, placement.prefill_tokens)
        prefill = placement.prefill.id if placement.prefill is not None else None
        self._traces.placed(number, epoch, prefill, placement.decode.id)
        self._metrics.placements.inc(1, "pair" if prefill is not None else "alone")
        return placement

    def unplace(self, room: RoomStream, placement: Placement) -> None:
        """Take a room off its workers."""
        self._first_expected.pop(room.number, None)  # what a restart costs was not to be predicted
        now = time.monotonic()
        self.moves.left(room, now)
        self.assignments[room.number].version.placer.close(placement, now)

    def prefilled(self, room: RoomStream, placement: Placement) -> None:
        """Take a room's prompt off its workers."""
        now, assignment = time.monotonic(), self.assignments[room.number]
        assignment.fix()
        if room.request.epoch == 0 and not placement.prefilled:  # later, output is among what the index said
            self._metrics.observe_index(placement.hit_tokens, room.cached_tokens)
        assignment.version.placer.prefilled(placement, now)
        self.moves.decoding(room, placement)
        expected = self._first_expected.pop(room.number, None)
        if expected is not None:
            self._metrics.ttft_error.observe(expected - now)

    def restarted(self, room: RoomStream, cause: RestartCause) -> None:
        """Count it. A version whose workers fail most of its streams gets no new ones."""
        if cause in _FAULTS:
            assignment = self.assignments[room.number]
            assignment.model.failed(assignment.version)
        self._metrics.restarts.inc(1)
        self._metrics.restart_causes.inc(1, cause)

    def closed(self, room: RoomStream) -> None:
        """Forget a room. The rooms that wait are given its place when the loop has run what is due now."""
        number = room.number
        self.rooms.pop(number, None)
        self.waiting.pop(number, None)
        self._first_expected.pop(number, None)
        admission = self.assignments[number].admission
        admission.produced(number, len(room.tokens))
        admission.leave(number)
        self.assignments.drop(number)
        if self.waiting and not self._admit_due:  # not at once: a room that closes may be one of many
            self._admit_due = True
            self._loop.call_soon(self._admit_soon)

    def _placement_request(self, room: RoomStream) -> PlacementRequest:
        """What the policy is told of a room that may have output already."""
        assignment = self.assignments[room.number]
        request = assignment.adapted(room.placement_request)
        if not room.tokens:
            return request
        left = room.request.sampling.max_new_tokens - len(room.tokens)
        return request._replace(
            prompt_tokens=request.prompt_tokens + len(room.tokens),
            output_tokens=assignment.version.placer.output_tokens(left),
        )

    def _expect_first(self, number: int, choice: Choice, now: float) -> None:
        """Predict when the first token comes, unless that was done at arrival."""
        if number not in self._first_expected:
            prediction = self.assignments[number].version.admission.predict(choice, admitted=True)
            if prediction is not None:
                self._first_expected[number] = now + prediction.ttft_s

    def _admit_soon(self) -> None:
        self._admit_due = False
        self.admit(time.monotonic())

    # -- mail ----------------------------------------------------------------------------------

    def take(self, mail: Mail, now: float) -> bool:
        """Take a message that is about rooms. Returns False for any other."""
        message = mail.message
        if isinstance(message, Tokens):
            for run in message.runs:
                self._on_run(mail.sender, run, now)
        elif isinstance(message, Receipt):
            self.mail.answered(RetransmitKey(mail.sender, message.room, message.epoch, message.of))
        elif isinstance(message, Reserved | Rejected | Timeline):
            self.mail.send(mail.sender, Receipt(message.room, message.epoch, kind_of(message)))
            self._on_room_message(mail.sender, message, now)
        elif isinstance(message, RoomStatus):
            room = self.rooms.get(message.room)
            worker = None if room is None else room.on_status(mail.sender, message, now)
            if worker is not None:
                self._traces.status(worker, message)
        else:
            return False
        return True

    def _on_run(self, sender: str, run: TokenRun, now: float) -> None:
        room = self.rooms.get(run.room)
        if room is None and run.room in self.foreign:
            return
        if room is None or run.epoch < room.request.epoch:
            upto = run.start + len(run.tokens)  # the worker may forget it
            if run.finish is None:
                self.mail.dismiss(sender, run.room, run.epoch)
        elif not _is_served_by(room, self.moves, sender):
            self._metrics.strays.inc(1)
            return
        else:
            self.moves.on_run(run, now)
            upto = room.on_run(sender, run, now)
        self.mail.acknowledge(sender, run.room, run.epoch, upto)

    def _on_room_message(self, sender: str, message: Reserved | Rejected | Timeline, now: float) -> None:
        if isinstance(message, Timeline):
            if self._traces.add_timeline(message):
                self._metrics.kv_bytes.inc(message.kv_bytes)
                pair = self._models.transferred(sender, message)
                if pair is not None:
                    self._metrics.observe_transfer(pair, message.kv_bytes, message.kv_seconds)
                self._metrics.observe_stages(message, self._models.worker_at(sender))
            return
        room = self.rooms.get(message.room)
        if room is None:
            return
        if not _is_served_by(room, self.moves, sender):
            self._metrics.strays.inc(1)
        elif isinstance(message, Reserved):
            room.on_reserved(message.epoch)
        else:
            # The worker has said that it is not at it; repeating what it refused would only be refused again.
            self.mail.answered(RetransmitKey(sender, message.room, message.epoch, "decode"))
            self.mail.answered(RetransmitKey(sender, message.room, message.epoch, "prefill"))
            if not self.moves.on_rejected(sender, message, now):
                room.on_rejected(sender, message, now)


def abort_requests(dispatcher: Dispatcher, request_id: str | None) -> list[str]:
    """End the requests of this id, or all, with an error. Returns their ids."""
    rooms = [*dispatcher.waiting.values(), *dispatcher.rooms.values()]
    found = [room for room in rooms if request_id in (None, room.request.request_id)]
    for room in found:
        room.fail(Aborted("an operator has ended this request"))
    return sorted({room.request.request_id for room in found})


def _is_served_by(room: RoomStream, moves: RoomMoves, mailbox: str) -> bool:
    """Whether the worker at an address has the room, or takes it over. Others have no say in it."""
    epoch = room.epoch
    return (epoch is not None and epoch.is_served_by(mailbox)) or moves.is_served_by(room.number, mailbox)
