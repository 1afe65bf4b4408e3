"""Rooms whose router is gone: paused, claimed by another router, dropped after the grace.

Both workers are the real ones; the test is the routers, the network and the clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from decode_node.room import DecodeHold, DecodeRoom
from scheduler.req import ReqState
from tests.support.hand_off import GROUPS, ROUTER, FakeMailbox, Letter, Pair, held, pair, prompt_of, right
from wire.messages.any_message import AnyMessage
from wire.messages.rooms import (
    Abort,
    Claim,
    Claimed,
    ClaimedRoom,
    Decode,
    Rejected,
    RejectKind,
    Resend,
    Tokens,
)
from wire.messages.transfer import KVTarget
from wire.peer_monitors import PeerState
from worker.loop import Worker

OTHER = "router-2"
GRACE_S = 30.0
PROMPT = prompt_of(3, 20)
TOKENS = 40


@pytest.fixture(params=GROUPS, ids=lambda groups: "+".join(("full", *groups)))
def both(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with pair(request.param, resume_grace_s=GRACE_S) as workers:
        yield workers


def tell(both: Pair, worker: Worker, state: PeerState) -> None:
    """The worker's mailbox reports the router."""
    mailbox: Any = worker.parts.services.mailbox
    assert isinstance(mailbox, FakeMailbox)
    mailbox.peers = {ROUTER: state}
    both.turn(worker)


def decoding(both: Pair, tokens: int = 3) -> DecodeRoom:
    """A room that has so many tokens on decode. Nothing else is under way."""
    both.ask(1, PROMPT, TOKENS)
    steps = itertools.count()
    while len(both.outputs[1].tokens) < tokens:
        both.step(next(steps))
    (room,) = both.decode.rooms()
    assert isinstance(room, DecodeRoom)
    assert room.hold is DecodeHold.SCHEDULER
    return room


def say(both: Pair, message: AnyMessage, sender: str = OTHER) -> list[AnyMessage]:
    """Send to decode; returns what it sends to `sender` at once."""
    both.arrive(Letter(sender, both.decode.record().mailbox, message))
    both.turn(both.decode)
    answers = [letter for letter in both.network.letters if letter.to == sender]
    for letter in answers:
        both.network.letters.remove(letter)
    return [letter.message for letter in answers]


def after(both: Pair, seconds: float) -> None:
    both.clock.now += seconds
    for worker in (both.decode, both.prefill):
        both.turn(worker)


def paused(both: Pair) -> DecodeRoom:
    """A room whose router has been gone for a moment."""
    room = decoding(both)
    tell(both, both.decode, PeerState.DOWN)
    assert room.req.state is ReqState.RUNNING
    after(both, 1.5)
    assert room.req.state is ReqState.PAUSED
    return room


def test_a_paused_room_keeps_everything_and_computes_nothing(both: Pair) -> None:
    room = paused(both)
    tokens, holds = list(room.req.output_ids), held(both.decode)
    assert holds
    for _ in range(5):
        after(both, 1.0)
    assert (room.req.output_ids, held(both.decode)) == (tokens, holds)


def test_after_the_grace_it_is_dropped(both: Pair) -> None:
    paused(both)
    after(both, GRACE_S)
    assert both.decode.rooms() == []
    assert not held(both.decode)
    assert say(both, Claim([1], 7)) == [Claimed(7, [])]


@pytest.mark.parametrize("back", ["up", "heard"])
def test_a_router_that_comes_back_has_lost_nothing(both: Pair, back: str) -> None:
    room = paused(both)
    if back == "up":
        tell(both, both.decode, PeerState.UP)
    else:
        both.arrive(Letter(ROUTER, both.decode.record().mailbox, Resend(1, 1, 0)))
    assert room.req.state is not ReqState.PAUSED
    finish(both)
    assert both.outputs[1].tokens == right(both, 1, both.decode.options.fake_groups)


def finish(both: Pair) -> None:
    for number in range(2000):
        if both.outputs[1].finish is not None:
            return
        both.step(number)
    raise AssertionError("the room does not end")


def test_a_router_that_said_its_last_word_late_is_still_gone(both: Pair) -> None:
    room = paused(both)
    both.arrive(Letter(ROUTER, both.decode.record().mailbox, Resend(1, 1, 0)))
    after(both, 1.5)
    assert room.req.state is ReqState.PAUSED
    after(both, GRACE_S)
    assert not held(both.decode)


@pytest.mark.parametrize("noticed", [True, False])
def test_another_router_claims_it_and_gets_all_of_it(both: Pair, noticed: bool) -> None:
    room = paused(both) if noticed else decoding(both)
    claimed = Claimed(7, [ClaimedRoom(1, 1, forced=0, newest=1001)])
    for _ in range(2):  # a repeat is answered like the first
        answers = say(both, Claim([1, 99], 7))
        assert [one for one in answers if isinstance(one, Claimed)] == [claimed]
    assert room.req.state is not ReqState.PAUSED
    tokens: list[int] = []
    answers = say(both, Resend(1, 1, 0))
    while room.req.state is not ReqState.DONE:
        answers += say(both, Resend(1, 1, len(tokens)))
        for run in (run for one in answers if isinstance(one, Tokens) for run in one.runs):
            if run.start <= len(tokens):
                tokens += run.tokens[len(tokens) - run.start :]
        answers = []
    want = right(both, 1, both.decode.options.fake_groups)
    assert tokens == want[: len(tokens)]
    (*_, last) = (one for one in say(both, Resend(1, 1, 0)) if isinstance(one, Tokens))
    assert (last.runs[0].tokens, last.runs[0].finish) == (want, "length")
    after(both, 1.0)
    assert not held(both.decode)


def test_the_router_that_had_it_is_told_and_cannot_end_it(both: Pair) -> None:
    room = decoding(both)
    say(both, Claim([1], 7))
    told = [letter.message for letter in both.network.letters if letter.to == ROUTER]
    assert [one.why for one in told if isinstance(one, Rejected)] == [RejectKind.CLAIMED]
    for epoch in (1, 2):  # it had begun another epoch, perhaps
        say(both, Abort(1, epoch), ROUTER)
        assert both.decode.rooms() == [room]
    again = Decode(replace(both.outputs[1].request, epoch=2))
    for late in (Resend(1, 1, 0), again):  # it was stopped, and did not know
        refused = [one for one in say(both, late, ROUTER) if isinstance(one, Rejected)]
        assert {one.why for one in refused} == {RejectKind.CLAIMED}
    assert both.decode.rooms() == [room]
    say(both, Abort(1, 1))
    assert both.decode.rooms() == []
    assert not held(both.decode)


def test_a_room_that_waits_for_its_kv_is_not_claimed_and_goes_before_the_grace(both: Pair) -> None:
    both.ask(1, PROMPT, TOKENS)
    both.hold_back(KVTarget)
    assert say(both, Claim([1], 7)) == [Claimed(7, [])]
    for worker in (both.decode, both.prefill):
        tell(both, worker, PeerState.DOWN)
    after(both, 2.0)
    assert both.decode.rooms(), "its KV may be on the way"
    after(both, 4.0)
    for _ in range(3):
        after(both, 1.0)
    for worker in (both.decode, both.prefill):
        assert worker.rooms() == []
        assert not held(worker)


def test_output_that_is_complete_is_claimed_too(both: Pair) -> None:
    both.ask(1, PROMPT, 4)
    while both.decode.rooms() or not len(both.decode.parts.services.outbox):
        both.turn(both.prefill)
        both.turn(both.decode)
        for letter in [one for one in both.network.letters if one.to == ROUTER]:
            both.network.letters.remove(letter)  # it is gone
        if both.network.letters:
            both.deliver(0)
    assert say(both, Claim([1], 7)) == [Claimed(7, [ClaimedRoom(1, 1, forced=0)])]
    say(both, Abort(1, 1), ROUTER)  # it lives, and its client has gone on at the other one
    (tokens,) = say(both, Resend(1, 1, 0))
    assert isinstance(tokens, Tokens)
    assert tokens.runs[0].tokens == right(both, 1, both.decode.options.fake_groups)
    say(both, Abort(1, 1))
    assert not len(both.decode.parts.services.outbox)
