"""Outbox: one message per step and router; output is kept until it is acknowledged."""

from __future__ import annotations

from wire.messages.any_message import AnyMessage
from wire.messages.rooms import ClaimedRoom, Tokens
from wire.request import FinishReason, OutputDelta, TokenLogprobs, TokenRun
from worker.outbox import Outbox, OutputKey

A, B = OutputKey(1, 1), OutputKey(2, 1)
FORCED = (7, 8, 9)
ROUTERS = ("tcp://router-0", "tcp://router-1")  # of rooms with even and with odd numbers


class Wire:
    def __init__(self) -> None:
        self.sent: list[tuple[str, list[TokenRun]]] = []

    def __call__(self, to: str, message: AnyMessage) -> None:
        assert isinstance(message, Tokens)
        self.sent.append((to, message.runs))


def outbox() -> tuple[Outbox, Wire]:
    wire = Wire()
    return Outbox("d-1", wire, lease_s=60.0), wire


def push(
    box: Outbox, key: OutputKey, start: int, tokens: list[int], finish: FinishReason | None = None
) -> None:
    logprobs = [TokenLogprobs(-float(token)) for token in tokens]
    box.push(ROUTERS[key.room % 2], key, start, OutputDelta(tokens, logprobs, finish), 4, FORCED[:start])


def test_one_message_per_flush_and_router() -> None:
    box, wire = outbox()
    push(box, A, 0, [10])
    push(box, B, 0, [20])
    push(box, OutputKey(3, 1), 0, [30])
    box.flush()
    assert sorted((to, [run.room for run in runs]) for to, runs in wire.sent) == [
        ("tcp://router-0", [2]),
        ("tcp://router-1", [1, 3]),
    ]
    box.flush()
    assert len(wire.sent) == 2, "nothing new, nothing sent"


def test_resend_repeats_what_is_asked_for_with_its_end() -> None:
    box, wire = outbox()
    push(box, A, 3, [10, 11])
    push(box, A, 5, [12], FinishReason.STOP)
    box.flush()
    box.ack(ROUTERS[1], [(1, 1, 4)])
    assert box.resend(ROUTERS[1], A, 4)
    box.flush()
    (_, (run,)) = wire.sent[-1]
    assert (run.start, run.tokens, run.finish) == (4, [11, 12], FinishReason.STOP)
    assert run.logprobs == [TokenLogprobs(-11.0), TokenLogprobs(-12.0)]
    assert box.resend(ROUTERS[1], A, 5)
    box.flush()
    assert wire.sent[-1][1][0].tokens == [12]


def test_a_retired_room_goes_with_its_last_ack_or_with_its_lease() -> None:
    box, _ = outbox()
    push(box, A, 0, [10], FinishReason.LENGTH)
    push(box, B, 0, [20], FinishReason.LENGTH)
    box.retire(A, now=0.0)
    box.retire(B, now=0.0)
    box.flush()
    box.ack(ROUTERS[1], [(1, 1, 1), (9, 9, 9)])
    assert not box.resend(ROUTERS[1], A, 0)
    assert box.resend(ROUTERS[0], B, 0)
    box.sweep(59.0)
    assert len(box) == 1
    box.sweep(60.0)
    assert len(box) == 0


def test_what_was_acknowledged_before_the_room_was_retired_goes_with_it() -> None:
    box, _ = outbox()
    push(box, A, 0, [10])  # the first token of a prompt that is handed off
    box.ack(ROUTERS[1], [(1, 1, 1)])
    box.retire(A, 5.0)
    assert len(box) == 0
    push(box, B, 0, [20])
    box.ack(ROUTERS[0], [(2, 1, 1)])
    push(box, B, 1, [], FinishReason.LENGTH)
    box.retire(B, 5.0)
    assert len(box) == 1, "the end may not have arrived"
    box.sweep(65.0)
    assert (len(box), box.swept) == (0, 1)


def test_a_discarded_room_is_unknown() -> None:
    box, _ = outbox()
    push(box, A, 0, [10])
    box.discard(A)
    assert not box.resend(ROUTERS[1], A, 0)


def test_everything_is_kept_for_a_router_that_claims_the_room() -> None:
    box, wire = outbox()
    push(box, A, 3, [10, 11])
    box.ack(ROUTERS[1], [(1, 1, 4)])
    push(box, A, 5, [12])
    box.ack(ROUTERS[1], [(1, 1, 6)])
    push(box, A, 6, [13], FinishReason.STOP)
    box.flush()
    box.retire(A, now=0.0)
    assert box.claim("tcp://other", 1) == ClaimedRoom(1, 1, forced=3)
    assert box.claim("tcp://other", 9) is None
    box.ack(ROUTERS[1], [(1, 1, 7)])  # too late, and no longer its business
    assert not box.resend(ROUTERS[1], A, 0)
    for start in range(8):
        assert box.resend("tcp://other", A, start)
        box.flush()
        to, (run,) = wire.sent[-1]
        assert (to, run.start, run.finish) == ("tcp://other", start, FinishReason.STOP)
        assert run.tokens == [7, 8, 9, 10, 11, 12, 13][start:]
        told = [one.logprob for one in run.logprobs or []]
        assert told == [0.0, 0.0, 0.0, -10.0, -11.0, -12.0, -13.0][start:]
    box.ack("tcp://other", [(1, 1, 7)])
    assert len(box) == 0
