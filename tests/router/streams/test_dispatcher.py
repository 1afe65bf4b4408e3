"""The dispatcher with rooms and workers that are not there: what happens to all rooms at once."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from common.errors import BatonError, Overloaded
from router.index.global_index import GlobalIndex, as_hashes
from router.metrics import RoomMetrics
from router.options import RouterOptions
from router.placement.admission import Admission
from router.placement.broken_pairs import BrokenPairs
from router.placement.models import Models
from router.placement.placer import Placer
from router.placement.policies import make_policy
from router.placement.policy import Choice, PlacementRequest
from router.streams.assignments import Assignment
from router.streams.dispatcher import Dispatcher, OpenRooms
from router.streams.stream import RoomStream
from router.trace import TraceStore
from tests.router.directory.test_directory import record
from wire.messages.any_message import AnyMessage
from wire.messages.base import Receipt
from wire.messages.rooms import Abort, Ack, Decode, Prefill, Rejected, RejectKind, Tokens
from wire.records import Role, WorkerLoad, WorkerRecord
from wire.request import GenerateRequest, OutputDelta, SamplingParams, TokenRun
from wire.sockets import Mail

ROOMY = WorkerLoad(free_tokens=1 << 20, headroom_tokens=1 << 20, headroom_rows=1 << 10)
P, Q = record("p", load=ROOMY), record("q", load=ROOMY)
D, E = (record(name, role=Role.DECODE, load=ROOMY, max_running_requests=64) for name in "de")
OPTIONS = RouterOptions(model=Path("m"), served_model_name="m", prefill_on_decode_tokens=0)


class Sink:
    """What one room said."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.error: BatonError | None = None
        self.accepted = False

    def on_tokens(self, delta: OutputDelta, cached_tokens: int) -> bool:
        self.tokens += delta.tokens
        return False

    def on_admitted(self) -> None:
        self.accepted = True

    def on_error(self, error: BatonError) -> None:
        self.error = error


class Desk:
    """A dispatcher, and everything that it sent."""

    def __init__(self, *workers: WorkerRecord, options: RouterOptions = OPTIONS) -> None:
        self.options = options
        self.sent: list[tuple[str, AnyMessage]] = []
        index = GlobalIndex()

        def make_version(broken_pairs: BrokenPairs) -> tuple[Placer, Admission]:
            policy = make_policy("kv", OPTIONS.weights, 0)
            placer = Placer(index, policy, 10.0, broken_pairs=broken_pairs)
            return placer, Admission(options, placer)

        self.models = Models({"m": {}}, make_version)
        self.versions = self.models.by_name["m"]
        self.models.update(list(workers), time.monotonic())
        self.placer = self.versions.all[0].placer
        self.metrics = metrics = RoomMetrics(CollectorRegistry())
        self.dispatcher = Dispatcher(
            options, self.models, TraceStore(), metrics, lambda to, message: self.sent.append((to, message))
        )

    def open(self, number: int, sink: Sink | None = None, assignment: Assignment | None = None) -> Sink:
        sink = sink or Sink()
        request = GenerateRequest(
            request_id="r", room=number, epoch=0, prompt=b"\0\0\0\0" * 64, sampling=SamplingParams()
        )
        to_place = PlacementRequest(64, as_hashes([]), 4.0)
        room = RoomStream(request, to_place, self.dispatcher, self.dispatcher.mail, sink, self.options)
        version = self.versions.choose(number.to_bytes(4, "big"))
        self.dispatcher.assignments.add([number], assignment or Assignment(self.versions, version))
        self.dispatcher.open([room], None, time.monotonic())
        return sink

    def on(self, worker: WorkerRecord, kind: type[Prefill | Decode], epoch: int) -> set[int]:
        """The rooms that a worker was told to start in that epoch."""
        return {
            message.room
            for to, message in self.sent
            if to == worker.mailbox and isinstance(message, kind) and message.epoch == epoch
        }

    def tokens(self, worker: WorkerRecord, room: int, *tokens: int, epoch: int = 0) -> None:
        run = TokenRun(room, epoch, 0, list(tokens))
        self.dispatcher.take(Mail(worker.mailbox, Tokens(worker.id, [run])), time.monotonic())


def test_one_suspicion_restarts_every_room_of_the_worker_at_once_and_no_other() -> None:
    async def run() -> None:
        desk = Desk(P, Q, D, E)
        sinks = {number: desk.open(number) for number in range(8)}
        on_d = desk.on(D, Decode, 0)
        assert on_d
        assert on_d < set(sinks)
        desk.placer.suspect(frozenset({D.id}))
        desk.dispatcher.gone(D, "does not answer", time.monotonic())
        assert desk.on(E, Decode, 1) == on_d
        assert desk.on(D, Decode, 1) == set()
        aborted = {message.room for to, message in desk.sent if isinstance(message, Abort)}
        assert aborted == on_d
        assert all(sink.error is None for sink in sinks.values())

    asyncio.run(run())


def test_tokens_of_a_worker_without_the_room_are_dropped() -> None:
    async def run() -> None:
        desk = Desk(P, D)
        sink = desk.open(1)
        stranger = record("s", role=Role.DECODE, mailbox="tcp://stranger:1")
        desk.sent.clear()
        desk.tokens(stranger, 1, 7)
        rejected = Rejected(1, 0, RejectKind.FAILED, "no")
        desk.dispatcher.take(Mail(stranger.mailbox, rejected), time.monotonic())
        desk.dispatcher.tick(time.monotonic())
        assert sink.tokens == []
        assert sink.error is None
        assert desk.on(D, Decode, 1) == set(), "the room was started again"
        acked = [to for to, message in desk.sent if isinstance(message, Ack)]
        assert stranger.mailbox not in acked
        (family,) = desk.metrics.strays.collect()
        assert family.samples[0].value == 2
        desk.tokens(D, 1, 8)
        assert sink.tokens == [8]

    asyncio.run(run())


def test_a_suspected_prefill_worker_matters_only_until_decode_speaks() -> None:
    async def run() -> None:
        desk = Desk(P, D)
        for number in (1, 2):
            desk.open(number)
        desk.tokens(D, 1, 7)
        desk.placer.suspect(frozenset({P.id}))
        desk.dispatcher.gone(P, "does not answer", time.monotonic())
        assert desk.on(D, Decode, 1) == {2}
        assert desk.on(P, Prefill, 1) == set(), "D alone, while P is suspected"

    asyncio.run(run())


def test_a_choice_that_waits_for_its_turn_is_not_refused_when_another_of_its_request_runs() -> None:
    async def run() -> None:
        desk = Desk(D, options=OPTIONS.model_copy(update={"max_in_flight": 1, "max_queued": 9}))
        accepted, other = Sink(), Sink()
        for number, sink in ((1, accepted), (2, accepted), (3, other)):
            desk.open(number, sink)
        desk.dispatcher.tick(time.monotonic() + 3600.0)
        assert isinstance(other.error, Overloaded)
        assert accepted.error is None
        assert set(desk.dispatcher.waiting) == {2}

    asyncio.run(run())


def test_a_worker_that_was_cut_off_is_told_again_that_an_epoch_or_a_room_is_over() -> None:
    async def run() -> None:
        desk = Desk(D, E)
        desk.open(1)
        (first,) = (one for one in (D, E) if desk.on(one, Decode, 0))
        now = time.monotonic()
        desk.tokens(first, 1, 5)
        desk.placer.suspect(frozenset({first.id}))
        desk.dispatcher.gone(first, "does not answer heartbeats", now)
        desk.dispatcher.tick(now + 60.0)  # the abort is given up
        for _ in range(3):
            desk.sent.clear()
            desk.tokens(first, 1, 5, 6)
            aborts = [(to, message) for to, message in desk.sent if isinstance(message, Abort)]
            assert aborts == [(first.mailbox, Abort(1, 0, "the epoch is over"))]
            desk.tokens(first, 1, 5, 6)
            assert len(desk.sent) == 1, "it is being told"
            desk.dispatcher.take(Mail(first.mailbox, Receipt(1, 0, "abort")), now)
        desk.dispatcher.stop([1], "the client has gone")
        desk.sent.clear()
        desk.tokens(first, 1, 5, 6)
        assert [message for _, message in desk.sent] == [Abort(1, 0, "the epoch is over")]

    asyncio.run(run())


def test_rooms_that_are_left_to_another_router_are_neither_ended_nor_acknowledged() -> None:
    async def run() -> None:
        desk = Desk(P, D)
        desk.open(1)
        now = time.monotonic()
        OpenRooms(desk.dispatcher, [1]).leave()
        desk.sent.clear()
        desk.dispatcher.take(Mail(D.mailbox, Tokens("d", [TokenRun(1, 0, 0, [5, 6])])), now)
        desk.dispatcher.tick(now)
        assert desk.sent == []
        assert not desk.dispatcher.rooms

    asyncio.run(run())


def test_a_worker_may_forget_what_it_sends_for_a_room_that_is_over() -> None:
    async def run() -> None:
        desk = Desk(P, D)
        desk.tokens(D, 99, 7, 8)
        desk.dispatcher.tick(time.monotonic())
        (ack,) = (message for to, message in desk.sent if isinstance(message, Ack) and to == D.mailbox)
        assert ack.items == [(99, 0, 2)]

    asyncio.run(run())


def test_only_rooms_that_run_are_left_to_another_router() -> None:
    async def run() -> None:
        desk = Desk(D)
        desk.open(1)
        desk.open(2)
        desk.dispatcher.stop([2], "its answer is complete")
        OpenRooms(desk.dispatcher, [1, 2]).leave()
        assert desk.dispatcher.foreign == {1}
        assert desk.dispatcher.rooms == {}

    asyncio.run(run())


def test_rooms_without_a_worker_look_for_one_only_when_the_workers_have_changed() -> None:
    async def run() -> None:
        desk = Desk(P)
        for number in range(5):
            desk.open(number)
        now, choose, looked = time.monotonic(), desk.placer.choose, []

        def counting(*of: Any) -> Choice | None:
            looked.append(of)
            return choose(*of)

        desk.placer.choose = counting  # type: ignore[method-assign]
        desk.placer.update([P, replace(D, draining=True)], now)
        desk.dispatcher.tick(now)
        assert len(looked) == 5
        for step in range(20):
            desk.placer.update([P, replace(D, draining=True)], now)  # a view like the last
            desk.dispatcher.tick(now + step / 20)
        assert len(looked) == 5
        desk.placer.update([P, D], now)
        desk.dispatcher.admit(now)
        assert desk.on(D, Decode, 0) == set(range(5))
        desk.placer.suspect(frozenset({D.id}))
        desk.dispatcher.gone(D, "does not answer", now)
        assert desk.on(D, Decode, 1) == set()
        desk.placer.suspect(frozenset())
        desk.dispatcher.admit(now)
        assert desk.on(D, Decode, 1) == set(range(5)), "a worker that is up again is another worker, too"

    asyncio.run(run())


def test_a_pair_that_one_room_found_broken_is_avoided_by_all() -> None:
    async def run() -> None:
        desk = Desk(P, D)
        desk.open(1)
        assert desk.on(P, Prefill, 0) == {1}
        said = Rejected(1, 0, RejectKind.FAILED, "no KV", blamed=P.mailbox)
        desk.dispatcher.take(Mail(D.mailbox, said), time.monotonic())
        for number in (2, 3):
            desk.open(number)
        assert desk.on(P, Prefill, 0) == {1}
        assert desk.on(D, Decode, 0) == {1, 2, 3}
        now = time.monotonic()
        desk.placer.update([P, D, E], now)
        desk.placer.suspect(frozenset({D.id}))
        desk.open(4)
        assert desk.on(P, Prefill, 0) == {1, 4}, "P does well with others"
        (pair,) = desk.placer.broken_pairs.history
        assert (pair.prefill, pair.decode, pair.cleared_at_unix) == (P.id, D.id, None)
        desk.dispatcher.gone(D, "does not answer", now)
        assert pair.cleared_at_unix is not None, "it was D"

    asyncio.run(run())
