"""A router dies while a room of it moves: the client resumes at another router.

Whatever the stage of the move, the client gets the whole answer: from the worker that has the room, or
computed again. In the end neither worker holds anything.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from decode_node.room import DecodeHold, DecodeRoom
from scheduler.req import ReqState
from tests.decode_node.test_moves import every_model
from tests.support.hand_off import Letter, prompt_of
from tests.support.two_decoders import Stream, TwoDecoders, two_decoders
from wire.messages.base import Receipt
from wire.messages.rooms import Decode, Rejected, RejectKind
from wire.messages.transfer import KVDone, KVTarget

GRACE_S = 30.0
TOKENS = 200
AGAIN = 101  # the number of a room that is computed again


@pytest.fixture
def two() -> Iterator[TwoDecoders]:
    with two_decoders(resume_grace_s=GRACE_S) as workers:
        yield workers


def ask(two: TwoDecoders) -> Stream:
    """A room on worker 0 whose router has some of its tokens."""
    stream = two.ask(1, prompt_of(1, 40), TOKENS)
    two.until(1, 5)
    return stream


def ends_well(two: TwoDecoders, groups: tuple[str, ...] = ()) -> None:
    """Every stream is exact, was not interrupted, and nothing is left."""
    two.finish()
    for room, stream in two.streams.items():
        assert stream.tokens == two.right(room, groups)
        assert RejectKind.CLAIMED not in {rejected.why for rejected in stream.rejected}
    two.settle()


def move_again(two: TwoDecoders) -> None:
    """The router that lives moves its room: it tries until the room has not outrun the reservation."""
    stream = two.streams[1]
    two.until(1, 10)
    while stream.moved == 0:
        assert stream.finish is None, "the room was not moved"
        if stream.moving is None:
            two.move(1)
        two.round()


def compute_again(two: TwoDecoders, room: int, where: int) -> None:
    """What a router does with a stream of which no worker has the room."""
    old = two.streams.pop(room)
    two.ask(AGAIN, prompt_of(room, 40), old.request.sampling.max_new_tokens, where)


@every_model
def test_before_the_new_worker_has_heard_of_it(groups: tuple[str, ...]) -> None:
    with two_decoders(groups, resume_grace_s=GRACE_S) as two:
        ask(two)
        two.move(1)
        two.hold_back(Decode)
        two.router_dies()
        assert two.claim(1)
        move_again(two)
        assert two.streams[1].where == 1
        assert two.computed(1) == 0
        ends_well(two, groups)


def test_before_the_new_worker_has_memory() -> None:
    """It has it when the room belongs to another router already."""
    with two_decoders(resume_grace_s=GRACE_S, max_total_tokens=260) as two:
        two.ask(2, prompt_of(2, 200), 55, where=1)
        two.until(2, 3)
        ask(two)
        two.move(1)
        two.round()
        (_, room) = two.workers[1].rooms()
        assert isinstance(room, DecodeRoom)
        assert room.hold is DecodeHold.BOOTSTRAP
        two.router_dies()
        assert two.claim(1)
        assert two.claim(2)
        while two.streams[2].finish is None:
            two.round()
        two.until(1, 40)
        assert two.workers[1].rooms() == [], "the first router's move is over"
        move_again(two)
        assert two.computed(1) == 200
        ends_well(two)


@every_model
@pytest.mark.parametrize("first", ["claim", "target"])
def test_when_the_new_worker_has_reserved(groups: tuple[str, ...], first: str) -> None:
    with two_decoders(groups, resume_grace_s=GRACE_S) as two:
        ask(two)
        two.move(1)
        target = two.hold_back(KVTarget)
        two.router_dies()
        if first == "target":
            two.network.letters.append(target)
            two.hold_back(KVDone)
            assert not two.claim(1), "nobody decodes the room"
            compute_again(two, 1, where=1)
        else:
            assert two.claim(1)
            two.network.letters.append(target)
            two.until(1, 40)
            assert two.workers[1].rooms() == [], "the first router's move is over"
            assert two.computed(1) == 0
        ends_well(two, groups)


def test_a_router_that_lives_does_not_move_a_room_that_another_has_claimed(two: TwoDecoders) -> None:
    """The client has changed its router, and the first one did not know."""
    ask(two)
    two.move(1)
    target = two.hold_back(KVTarget)
    two.router = "another"
    assert two.claim(1)
    two.network.letters.append(target)
    two.until(1, 40)
    assert two.workers[1].rooms() == []
    ends_well(two)


@pytest.mark.parametrize("times", [1, 3])
def test_a_claimed_room_moves_although_moves_failed_before(two: TwoDecoders, times: int) -> None:
    """No router uses an epoch that another may have used: a worker does nothing for one that is over."""
    ask(two)
    for _ in range(times):
        two.move(1)
        two.hold_back(KVTarget)
        two.cancel(1)
        two.round()
    two.router_dies()
    assert two.claim(1)
    move_again(two)
    assert two.computed(1) == 0
    ends_well(two)


@every_model
def test_the_move_goes_on_without_a_router(groups: tuple[str, ...]) -> None:
    with two_decoders(groups, resume_grace_s=GRACE_S) as two:
        ask(two)
        two.move(1)
        target = two.hold_back(KVTarget)
        two.router_dies()
        two.network.letters.append(target)
        done = two.hold_back(KVDone)
        assert two.ask_for(1) == {}
        two.network.letters.append(done)
        two.round()
        two.pass_time(GRACE_S / 2)
        (room,) = two.workers[1].rooms()
        assert room.req.state is ReqState.PAUSED
        assert two.claim(1)
        assert two.streams[1].where == 1
        assert two.computed(1) == 0
        ends_well(two, groups)


def test_a_long_context_that_takes_long(two: TwoDecoders) -> None:
    """The old worker has noticed that the router is gone when the KV has left."""
    two.ask(1, prompt_of(1, 400), TOKENS)
    two.until(1, 3)
    two.move(1)
    target = two.hold_back(KVTarget)
    two.router_dies()
    two.clock.now += 0.9
    two.network.letters.append(target)
    two.deliver(two.network.letters.index(target))
    two.pass_time(0.3)
    two.hold_back(Receipt)
    while two.workers[0].rooms():
        two.round()
    assert two.claim(1)
    assert (two.streams[1].where, two.computed(1)) == (1, 0)
    ends_well(two)


def test_a_paused_room_stays_and_can_be_claimed(two: TwoDecoders) -> None:
    """The new worker has got memory after the old one has noticed that the router is gone."""
    ask(two)
    two.move(1)
    target = two.hold_back(KVTarget)
    two.router_dies()
    two.clock.now += 1.5
    two.workers[0].turn([])
    (room,) = two.workers[0].rooms()
    assert room.req.state is ReqState.PAUSED
    two.network.letters.append(target)
    for _ in range(10):
        two.round()
    assert two.workers[1].rooms() == []
    two.pass_time(GRACE_S / 2)
    assert two.claim(1)
    assert two.streams[1].where == 0
    ends_well(two)


def test_the_last_message_of_the_move_is_lost_too(two: TwoDecoders) -> None:
    ask(two)
    two.move(1)
    two.hold_back(KVDone)
    two.router_dies()
    for _ in range(8):
        two.clock.now += 1.0
        for worker in two.workers:
            worker.turn([])
        while two.network.letters:
            two.network.letters[:] = [
                one for one in two.network.letters if not isinstance(one.message, KVDone)
            ]
            if two.network.letters:
                two.deliver()
    assert [worker.rooms() for worker in two.workers] == [[], []]
    assert not two.claim(1)
    compute_again(two, 1, where=0)
    ends_well(two)


@every_model
@pytest.mark.parametrize("confirmed", [True, False])
def test_after_the_hand_over(groups: tuple[str, ...], confirmed: bool) -> None:
    """The router has received nothing of the new epoch. `confirmed`: the old worker knows that it is over."""
    with two_decoders(groups, resume_grace_s=GRACE_S) as two:
        ask(two)
        two.move(1)
        done = two.hold_back(KVDone)
        had = list(two.streams[1].tokens)
        two.router_dies()
        two.network.letters.append(done)
        two.deliver(two.network.letters.index(done))
        if confirmed:
            while two.workers[0].rooms():
                two.round()
        else:
            _lose_receipts(two)
        assert two.claim(1)
        stream = two.streams[1]
        assert (stream.where, stream.request.epoch) == (1, 2)
        two.until(1, len(had) + 10)
        assert stream.tokens[: len(had)] == had
        assert two.computed(1) == 0
        ends_well(two, groups)


def _lose_receipts(two: TwoDecoders) -> None:
    def is_receipt(letter: Letter) -> bool:
        return isinstance(letter.message, Receipt) and letter.message.of == "kv_done"

    two.network.letters[:] = [one for one in two.network.letters if not is_receipt(one)]


def test_nobody_resumes(two: TwoDecoders) -> None:
    """After the grace nothing is held, at whatever stage the move was."""
    stages: list[type] = [Decode, KVTarget, KVDone, Rejected]
    for room, stage in enumerate(stages, start=1):
        two.ask(room, prompt_of(room, 40), TOKENS)
        two.until(room, 3)
        two.move(room)
        two.hold_back(stage)
    two.router_dies()
    two.settle()
