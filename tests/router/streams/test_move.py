"""Rooms of a worker that leaves: what the router tells whom, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from msgspec.structs import replace

from tests.router.streams.test_dispatcher import OPTIONS, ROOMY, D, Desk, E, P, Sink
from wire.messages.rooms import Abort, Decode, Rejected, RejectKind, Tokens
from wire.messages.transfer import KVFailed
from wire.records import WorkerLoad, WorkerRecord
from wire.request import FinishReason, TokenRun
from wire.sockets import Mail


class MovingDesk(Desk):
    """Rooms decode on D, alone at first; E joins, and D leaves."""

    def __init__(self, rooms: int = 1) -> None:
        super().__init__(D)
        self.sinks: dict[int, Sink] = {}
        for number in range(1, rooms + 1):
            self.sinks[number] = self.open(number)
            self.run(D, number, 0, 0, 5, 6)
        self.now = time.monotonic()

    def run(
        self, worker: WorkerRecord, room: int, epoch: int, start: int, *tokens: int, finish: bool = False
    ) -> None:
        run = TokenRun(room, epoch, start, list(tokens), finish=FinishReason.LENGTH if finish else None)
        self.dispatcher.take(Mail(worker.mailbox, Tokens(worker.id, [run])), time.monotonic())

    def leave(self, *others: WorkerRecord) -> None:
        self.placer.update([replace(D, draining=True), *others], self.now)
        self.dispatcher.moves.leave(frozenset({D.id}), self.now)

    def moved_to(self, worker: WorkerRecord) -> list[Decode]:
        return [m for to, m in self.sent if to == worker.mailbox and isinstance(m, Decode) and m.move]

    def told(self, worker: WorkerRecord, kind: type) -> list[tuple[int, int]]:
        return [(m.room, m.epoch) for to, m in self.sent if to == worker.mailbox and isinstance(m, kind)]  # type: ignore[union-attr]

    def reject(self, worker: WorkerRecord, room: int, epoch: int, why: RejectKind) -> None:
        self.dispatcher.take(Mail(worker.mailbox, Rejected(room, epoch, why, "so")), time.monotonic())

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.dispatcher.tick(self.now)


def on_loop(test: Callable[[], None]) -> Callable[[], None]:
    """A dispatcher belongs to an event loop."""

    async def run() -> None:
        test()

    return lambda: asyncio.run(run())


@on_loop
def test_a_room_is_moved_while_it_goes_on() -> None:
    desk = MovingDesk()
    desk.leave(E)
    (decode,) = desk.moved_to(E)
    assert (decode.room, decode.epoch, decode.prefill) == (1, 1, D.mailbox)
    assert decode.request.forced == (5, 6)
    desk.run(D, 1, 0, 2, 7, 8)
    desk.run(E, 1, 1, 2, 7, 8, 9)
    assert desk.sinks[1].tokens == [5, 6, 7, 8, 9]
    assert desk.told(D, Abort) == [(1, 0)]
    desk.run(D, 1, 0, 4, 9, 10)
    desk.run(E, 1, 1, 5, 10, finish=True)
    assert desk.sinks[1].tokens == [5, 6, 7, 8, 9, 10]
    assert not desk.dispatcher.rooms
    assert desk.told(E, Abort) == []
    assert desk.placer.fleet.estimate(E.id).own.requests == 0  # type: ignore[union-attr]


@on_loop
def test_a_room_whose_worker_says_that_it_moved_needs_that_worker_no_longer() -> None:
    desk = MovingDesk()
    desk.leave(E)
    desk.reject(D, 1, 0, RejectKind.MOVED)
    desk.dispatcher.gone(D, "was lost", desk.now)
    assert desk.on(E, Decode, 2) == set(), "it is not restarted"
    desk.run(E, 1, 1, 2, 7)
    assert desk.sinks[1].tokens == [5, 6, 7]


@on_loop
def test_a_move_that_fails_is_tried_again_with_a_new_number() -> None:
    desk = MovingDesk()
    desk.leave(E)
    assert desk.placer.fleet.estimate(E.id).own.requests == 1  # type: ignore[union-attr]
    desk.reject(E, 1, 1, RejectKind.FAILED)
    assert desk.placer.fleet.estimate(E.id).own.requests == 0  # type: ignore[union-attr]
    assert desk.told(D, KVFailed) == [(1, 1)]
    desk.run(D, 1, 0, 2, 7)
    desk.later(0.1)
    assert len(desk.moved_to(E)) == 1
    desk.later(1.0)
    assert [(one.epoch, one.request.forced) for one in desk.moved_to(E)] == [(1, (5, 6)), (2, (5, 6, 7))]
    desk.run(E, 1, 1, 2, 7)
    desk.run(E, 1, 2, 3, 8)
    assert desk.sinks[1].tokens == [5, 6, 7, 8]


@on_loop
def test_a_move_to_a_worker_that_is_gone_or_silent_is_given_up() -> None:
    desk = MovingDesk()
    desk.leave(E)
    desk.placer.suspect(frozenset({E.id}))
    desk.dispatcher.gone(E, "is silent", desk.now)
    assert desk.told(D, KVFailed) == [(1, 1)]
    desk.later(1.0)
    assert len(desk.moved_to(E)) == 1, "it is suspected"
    desk.placer.suspect(frozenset())
    desk.later(1.0)
    desk.later(40.0)
    assert set(desk.told(D, KVFailed)) == {(1, 1), (1, 2)}
    desk.run(D, 1, 0, 2, 7)
    assert desk.sinks[1].tokens == [5, 6, 7]


@on_loop
def test_a_restart_ends_the_move_and_takes_another_number() -> None:
    desk = MovingDesk()
    desk.leave(E)
    desk.reject(D, 1, 0, RejectKind.DRAINING)
    assert desk.told(E, Abort) == [(1, 1)]
    assert desk.on(E, Decode, 2) == {1}
    (last,) = [m for to, m in desk.sent if isinstance(m, Decode) and m.epoch == 2]
    assert isinstance(last, Decode)
    assert not last.move
    assert last.prefill is None


@on_loop
def test_few_rooms_move_at_once_and_only_where_there_is_memory() -> None:
    desk = MovingDesk(rooms=6)
    full = replace(
        E, load=WorkerLoad(free_tokens=16, headroom_tokens=16, headroom_rows=4, running_requests=1)
    )
    desk.leave(full)
    assert desk.moved_to(E) == []
    desk.leave(replace(E, load=replace(ROOMY, running_requests=1)))
    assert len(desk.moved_to(E)) == 2
    for number in range(1, 7):
        begun = desk.moved_to(E)[number - 1]
        desk.run(E, begun.room, 1, 2, 7)
        assert len(desk.moved_to(E)) == min(6, number + 2), "the next one begins when one is over"
    assert all(sink.tokens == [5, 6, 7] for sink in desk.sinks.values())


@on_loop
def test_a_room_without_tokens_of_its_worker_is_not_moved_yet() -> None:
    desk = MovingDesk()
    desk.placer.update([P, D], desk.now)
    desk.open(2)
    desk.leave(P, E)
    assert [one.room for one in desk.moved_to(E)] == [1]


@on_loop
def test_a_client_that_leaves_ends_both_epochs() -> None:
    desk = MovingDesk()
    desk.leave(E)
    desk.dispatcher.stop([1], "gone")
    assert desk.told(D, Abort) == [(1, 0)]
    assert desk.told(E, Abort) == [(1, 1)]
    assert OPTIONS.max_restarts
    desk.later(1.0)
    assert len(desk.moved_to(E)) == 1
