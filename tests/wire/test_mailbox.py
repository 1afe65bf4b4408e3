"""Mailboxes deliver typed messages both ways, survive garbage, and honour the cluster secret."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from wire.mailbox import Mail, Mailbox
from wire.messages import Abort, Receipt, Watch
from wire.security import Curve


@pytest.fixture(params=[None, "secret"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Mailbox, Mailbox]]:
    curve = Curve(request.param) if request.param else None
    with Mailbox(curve=curve) as left, Mailbox(curve=curve) as right:
        yield left, right


def test_answering_goes_to_the_reply_address(pair: tuple[Mailbox, Mailbox]) -> None:
    left, right = pair
    left.send(right.address, Abort(1, 2, "why"))
    (mail,) = right.wait(5.0)
    assert mail == Mail(left.address, Abort(1, 2, "why"))
    right.send(mail.sender, Receipt(1, 2, "abort"))
    assert [m.message for m in left.wait(5.0)] == [Receipt(1, 2, "abort")]


def test_order_is_kept_within_one_connection(pair: tuple[Mailbox, Mailbox]) -> None:
    left, right = pair
    for epoch in range(500):
        left.send(right.address, Abort(1, epoch))
    got: list[Mail] = []
    while len(got) < 500:
        fresh = right.wait(5.0)
        assert fresh, "mail stopped coming"
        got += fresh
    assert [m.message.epoch for m in got if isinstance(m.message, Abort)] == list(range(500))


def test_garbage_is_counted_and_costs_nothing_else() -> None:
    with Mailbox() as left, Mailbox() as right:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(right.address)
        socket.send_multipart([b"tcp://nobody", b"\xc1 not msgpack"])
        socket.send_multipart([b"one frame too few"])
        socket.send_multipart([b"\xff\xfe", b"\x80"])
        left.send(right.address, Watch())
        assert [m.message for m in right.wait(5.0)] == [Watch()]
        deadline = time.monotonic() + 5.0
        while right.rejected_frames < 3 and time.monotonic() < deadline:
            right.wait(0.01)
        assert right.rejected_frames == 3
        context.destroy(linger=0)


def test_a_stranger_without_the_secret_is_not_heard() -> None:
    with Mailbox(curve=Curve("secret")) as member, Mailbox(curve=Curve("other")) as stranger:
        stranger.send(member.address, Watch())
        assert member.wait(0.5) == []


def test_nudge_ends_a_wait() -> None:
    with Mailbox() as mailbox:
        started = time.monotonic()
        timer = threading.Timer(0.05, mailbox.nudge)
        timer.start()
        assert mailbox.wait(30.0) == []
        assert time.monotonic() - started < 10.0
        timer.join()


def test_a_restarted_peer_is_reached_at_its_new_address() -> None:
    with Mailbox() as left:
        first = Mailbox()
        left.send(first.address, Watch())
        assert first.wait(5.0)
        first.close()
        left.send(first.address, Watch())  # to nobody: neither blocks nor raises
        left.forget(first.address)
        with Mailbox() as second:
            left.send(second.address, Watch())
            assert second.wait(5.0)
