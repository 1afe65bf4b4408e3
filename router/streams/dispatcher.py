"""Dispatcher: between the mailbox and the rooms. Both live on the event loop, so nothing here needs a lock.

Acknowledgements are cumulative, so they are gathered and sent with the next tick.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from router.metrics import RouterMetrics
from router.options import RouterOptions
from router.placement.admission import Admission
from router.placement.placement import Placement
from router.placement.placer import Placer
from router.placement.policy import Choice, PlacementRequest
from router.placement.prediction import Prediction
from router.streams.stream import RoomPlan, RoomStream
from router.trace import TraceStore
from wire.loop_mailbox import LoopMailbox
from wire.messages import (
    Ack,
    AnyMessage,
    Inspected,
    Receipt,
    Rejected,
    Reserved,
    Timeline,
    TokenRun,
    Tokens,
    kind_of,
)
from wire.records import WorkerRecord
from wire.retransmitter import RetransmitKey, Retransmitter
from wire.security import curve_for
from wire.sockets import Mail


class Dispatcher:
    """All rooms of a router, and its mailbox. Implements RoomHost. Belongs to one event loop."""

    def __init__(
        self,
        options: RouterOptions,
        placer: Placer,
        traces: TraceStore,
        metrics: RouterMetrics,
        on_other: Callable[[Mail, float], None],
    ) -> None:
        """`on_other` gets the mail that is about no room (the directory's)."""
        self.placer = placer
        self.admission = Admission(options, placer)
        self.rooms: dict[int, RoomStream] = {}  # admitted
        self.waiting: dict[int, RoomStream] = {}  # in admission's queue
        self._options = options
        self._traces = traces
        self._metrics = metrics
        self._on_other = on_other
        self._placements: dict[int, Placement] = {}  # by room
        self._fresh: tuple[int, Choice] | None = None  # made for a room at its arrival, not booked yet
        self._first_expected: dict[int, float] = {}  # when a room's first token was predicted to come
        self._acks: dict[str, dict[tuple[int, int], int]] = {}
        self._inspections: dict[int, asyncio.Future[str]] = {}
        self._loop = asyncio.get_running_loop()
        self._admit_due = False
        self.mailbox = LoopMailbox(options.interface, curve_for(options.cluster_secret), self._on_mail)
        self._retransmitter = Retransmitter(self.mailbox.send)

    def open(self, rooms: list[RoomStream], judged: tuple[Choice, Prediction] | None, now: float) -> None:
        """Open the rooms of one request. `judged` is what admission returned for the first of them."""
        for room in rooms:
            self.waiting[room.plan.room] = room
            self.admission.enqueue(room.plan.room, self.placement_request(room.plan), now)
        if judged is not None:
            choice, prediction = judged
            first = rooms[0].plan.room
            self._fresh = first, choice
            self._first_expected[first] = now + prediction.ttft_s
        self.admit(now)

    def admit(self, now: float) -> None:
        """Give workers to the rooms whose turn it is."""
        while (number := self.admission.admit(now)) is not None:
            room = self.rooms[number] = self.waiting.pop(number)
            room.start(now)
        self._fresh = None  # by its turn, if that comes later, another choice may be better

    def tick(self, now: float) -> None:
        """Repeat what is unanswered, wake rooms that are due, acknowledge."""
        for key in self._retransmitter.tick(now):
            room = self.rooms.get(key.room)
            if room is not None:
                room.on_given_up(key, now)
        for number, room in list(self.rooms.items()):
            room.tick(now)
            self.admission.produced(number, len(room.tokens))
        self.placer.tick(now)
        for number, error in self.admission.overdue(now):
            late = self.waiting.get(number)
            if late is not None:  # else it went with another choice of its request
                late.fail(error)
        self.admit(now)
        for address, upto in self._acks.items():
            self.mailbox.send(address, Ack([(room, epoch, end) for (room, epoch), end in upto.items()]))
        self._acks.clear()

    def lost(self, worker: WorkerRecord, now: float) -> None:
        """A worker is gone: its rooms start again elsewhere."""
        for room in list(self.rooms.values()):
            room.on_worker_lost(worker, now)
        self.mailbox.forget(worker.mailbox)

    async def inspect(self, worker: WorkerRecord, token: int, message: AnyMessage, timeout_s: float) -> str:
        """A worker's report. Raises TimeoutError when it does not answer."""
        future: asyncio.Future[str] = self._loop.create_future()
        self._inspections[token] = future
        self.mailbox.send(worker.mailbox, message)
        try:
            return await asyncio.wait_for(future, timeout_s)
        finally:
            del self._inspections[token]

    def close(self) -> None:
        """Give up every room and close the mailbox."""
        for room in [*self.waiting.values(), *self.rooms.values()]:
            room.stop("the router is closing")
        self.mailbox.close()

    # -- RoomHost ------------------------------------------------------------------------------

    def place(self, room: RoomStream, avoid: set[str]) -> Placement | None:
        """See RoomHost."""
        plan, placer, now = room.plan, self.placer, time.monotonic()
        fresh, self._fresh = self._fresh, None
        if fresh is not None and fresh[0] == plan.room:
            choice: Choice | None = fresh[1]
        else:
            request = self.placement_request(plan, len(room.tokens))
            choice = placer.choose(request, now, frozenset(avoid))
        if choice is None:
            return None
        if room.epoch == 0:
            self._expect_first(plan.room, choice, now)
        placement = self._placements[plan.room] = placer.place(choice, now)
        self.admission.placed(plan.room, placement.prefill_tokens)
        prefill = placement.prefill.id if placement.prefill is not None else None
        self._traces.placed(plan.room, room.epoch, prefill, placement.decode.id)
        self._metrics.placements.inc(of="pair" if prefill is not None else "alone")
        return placement

    def placement_request(self, plan: RoomPlan, forwarded: int = 0) -> PlacementRequest:
        """What the policy is told of a room that has this many output tokens already."""
        left = plan.sampling.max_new_tokens - forwarded
        return PlacementRequest(
            plan.prompt_tokens + forwarded, plan.page_hashes, self.placer.output_tokens(left),
            session=plan.session, tenant=plan.tenant, priority=plan.priority,
        )  # fmt: skip

    def unplace(self, room: RoomStream) -> None:
        """See RoomHost."""
        self._first_expected.pop(room.plan.room, None)  # what a restart costs was not to be predicted
        placement = self._placements.pop(room.plan.room, None)
        if placement is not None:
            self.placer.close(placement, time.monotonic())

    def prefilled(self, room: RoomStream) -> None:
        """See RoomHost."""
        number, now = room.plan.room, time.monotonic()
        placement = self._placements[number]
        self.placer.prefilled(placement, now)
        if room.restarts == 0:  # later epochs have output among what is said to be cached
            self._metrics.observe_index(placement.hit_tokens, room.cached_tokens)
        expected = self._first_expected.pop(number, None)
        if expected is not None:
            self._metrics.ttft_error.observe(expected - now)

    def send(self, to: str, message: AnyMessage) -> None:
        """See RoomHost."""
        self.mailbox.send(to, message)

    def say(self, key: RetransmitKey, message: AnyMessage) -> None:
        """See RoomHost."""
        self._retransmitter.say(key, message, time.monotonic(), self._options.receipt_timeout_s)

    def answered(self, key: RetransmitKey) -> None:
        """See RoomHost."""
        self._retransmitter.answered(key)

    def closed(self, room: RoomStream) -> None:
        """See RoomHost."""
        number = room.plan.room
        self.rooms.pop(number, None)
        self.waiting.pop(number, None)
        self._first_expected.pop(number, None)
        self.admission.produced(number, len(room.tokens))
        self.admission.leave(number)
        if room.restarts:
            self._metrics.restarts.inc(room.restarts)
        if self.waiting and not self._admit_due:  # not here: a room that closes may be one of many
            self._admit_due = True
            self._loop.call_soon(self._admit_soon)

    # -- inside --------------------------------------------------------------------------------

    def _expect_first(self, number: int, choice: Choice, now: float) -> None:
        """Predict when the first token comes, unless that was done at arrival."""
        if number not in self._first_expected:
            prediction = self.admission.predict(choice, admitted=True)
            if prediction is not None:
                self._first_expected[number] = now + prediction.ttft_s

    def _admit_soon(self) -> None:
        self._admit_due = False
        self.admit(time.monotonic())

    # -- mail ----------------------------------------------------------------------------------

    def _on_mail(self, batch: list[Mail]) -> None:
        now = time.monotonic()
        for mail in batch:
            message = mail.message
            if isinstance(message, Tokens):
                for run in message.runs:
                    self._on_run(mail.sender, run, now)
            else:
                self._on_message(mail, now)

    def _on_run(self, sender: str, run: TokenRun, now: float) -> None:
        room = self.rooms.get(run.room)
        if room is None or room.epoch != run.epoch:
            upto = run.start + len(run.tokens)  # a room that is over: the worker may forget it
        else:
            upto = room.on_run(sender, run, now)
        acks = self._acks.setdefault(sender, {})
        key = (run.room, run.epoch)
        acks[key] = max(upto, acks.get(key, 0))

    def _on_message(self, mail: Mail, now: float) -> None:
        message = mail.message
        if isinstance(message, Receipt):
            self._retransmitter.answered(RetransmitKey(mail.sender, message.room, message.epoch, message.of))
        elif isinstance(message, Reserved | Rejected | Timeline):
            self.mailbox.send(mail.sender, Receipt(message.room, message.epoch, kind_of(message)))
            self._on_room_message(mail.sender, message, now)
        elif isinstance(message, Inspected):
            future = self._inspections.get(message.token)
            if future is not None and not future.done():
                future.set_result(message.body)
        else:
            self._on_other(mail, now)

    def _on_room_message(self, sender: str, message: Reserved | Rejected | Timeline, now: float) -> None:
        if isinstance(message, Timeline):
            if self._traces.add_timeline(message):
                self._metrics.kv_bytes.inc(message.kv_bytes)
                self._metrics.observe_stages(message.stamps)
            return
        room = self.rooms.get(message.room)
        if room is None:
            return
        if isinstance(message, Reserved):
            room.on_reserved(message.epoch)
        else:
            # The worker has said that it is not at it; repeating what it refused would only be refused again.
            self._retransmitter.answered(RetransmitKey(sender, message.room, message.epoch, "decode"))
            self._retransmitter.answered(RetransmitKey(sender, message.room, message.epoch, "prefill"))
            room.on_rejected(sender, message, now)
