"""Mailboxes deliver typed messages both ways, survive garbage, and honour the cluster secret."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from tests.support.members import OTHER_SECRET, SECRET, curve_of
from wire.addresses import parse_address
from wire.codec import encode
from wire.loop_mailbox import LoopMailbox
from wire.mailbox import Mail, Mailbox
from wire.messages.base import Receipt
from wire.messages.directory import Watch
from wire.messages.rooms import Abort
from wire.peer_monitors import PeerMonitors
from wire.security import Curve
from wire.senders import NO_MARK
from wire.sockets import PeerSockets, open_context


def framed(sender: bytes, *payloads: bytes) -> bytes:
    messages = (len(payload).to_bytes(4, "little") + payload for payload in payloads)
    return bytes((len(sender),)) + sender + NO_MARK + b"".join(messages)


GARBAGE = [
    b"",
    b"\x00",
    b"\x09too short",
    framed(b"tcp://nobody:1"),
    framed(b"tcp://nobody:1", b""),
    framed(b"tcp://nobody:1", encode(Watch()))[:-1],
    framed(b"tcp://nobody:1", b"\xc1 not msgpack"),
    framed(b"\xff\xfe", b"\x80"),
]


@pytest.fixture(params=[None, SECRET])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Mailbox, Mailbox]]:
    with Mailbox(curve=curve_of(request.param)) as left, Mailbox(curve=curve_of(request.param)) as right:
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


def test_what_is_sent_does_not_wait_for_the_next_check_of_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wire.mailbox.PEER_CHECK_S", 3600.0)
    with Mailbox() as left, Mailbox() as right:
        for epoch in range(20):  # each time the I/O thread has gone to sleep
            left.send(right.address, Abort(1, epoch))
            assert [m.message for m in right.wait(20.0)] == [Abort(1, epoch)]


def test_garbage_is_counted_and_costs_nothing_else() -> None:
    with Mailbox() as left, Mailbox() as right:
        context = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.connect(parse_address(right.address).endpoint)
        for garbage in GARBAGE:
            socket.send(garbage)
        left.send(right.address, Watch())
        assert [m.message for m in right.wait(5.0)] == [Watch()]
        deadline = time.monotonic() + 5.0
        while right.rejected_messages < len(GARBAGE) and time.monotonic() < deadline:
            right.wait(0.01)
        assert right.rejected_messages == len(GARBAGE)
        context.destroy(linger=0)


def test_a_stranger_without_the_secret_is_not_heard() -> None:
    with Mailbox(curve=curve_of()) as member, Mailbox(curve=curve_of(OTHER_SECRET)) as stranger:
        stranger.send(member.address, Watch())
        assert member.wait(0.5) == []


def test_a_message_to_no_valid_address_is_dropped_and_costs_nothing_else() -> None:
    with Mailbox() as left, Mailbox() as right:
        left.watch(frozenset({"nowhere", "tcp://127.0.0.1:none"}))
        left.send("nowhere", Watch())
        left.send("", Watch())
        left.send(right.address, Watch())
        assert [m.message for m in right.wait(5.0)] == [Watch()]
        assert left.dropped == 2
        assert left.running


def test_a_peer_for_which_no_descriptor_is_left_is_not_reached_and_costs_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_monitor(self: PeerMonitors, address: str, socket: zmq.Socket[bytes]) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    with Mailbox() as left, Mailbox() as right, Mailbox() as other:
        left.send(right.address, Watch())
        assert right.wait(5.0)
        with monkeypatch.context() as without:
            without.setattr(PeerMonitors, "add", no_monitor)
            left.send(other.address, Watch())
            left.send(right.address, Watch(2))
            assert [m.message for m in right.wait(5.0)] == [Watch(2)]
        assert left.running
        left.send(other.address, Watch(3))
        assert [m.message for m in other.wait(5.0)] == [Watch(3)]


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


def test_an_idle_connection_is_listed_and_closed_after_a_while() -> None:
    context = open_context()
    with Mailbox() as idle, Mailbox() as watched:
        sockets = PeerSockets(context, "tcp://127.0.0.1:1", None, lambda *_: None)
        for there in (idle, watched):
            sockets.send(there.address, Watch())
        sockets.flush()
        assert idle.wait(5.0)
        assert watched.wait(5.0)
        sockets.watch(frozenset({watched.address}))
        now = time.monotonic()
        (row,) = sockets.connections("here", now)
        assert (row.holder, row.what, row.owner) == ("here", "connection", idle.address)
        assert row.age_s is not None
        assert row.deadline_s is not None
        assert 0 <= row.age_s == pytest.approx(300.0 - row.deadline_s)
        sockets.check(now + row.deadline_s - 20.0)
        assert len(sockets.connections("here", now)) == 1
        sockets.check(now + row.deadline_s + 1.0)
        assert sockets.connections("here", now) == []
        sockets.send(watched.address, Watch())
        sockets.flush()
        assert watched.wait(5.0)
        sockets.close()
        context.destroy(linger=0)


class OnLoop:
    """A LoopMailbox and what it was told."""

    def __init__(self, curve: Curve | None = None) -> None:
        self.mailbox = LoopMailbox("127.0.0.1", curve, self._take, lambda *_: None)
        self.mail: list[Mail] = []
        self._told = asyncio.Event()

    def _take(self, mail: list[Mail]) -> None:
        self.mail += mail
        self._told.set()

    async def until(self, count: int) -> list[Mail]:
        while len(self.mail) < count:
            self._told.clear()
            await asyncio.wait_for(self._told.wait(), 5.0)
        return self.mail


@pytest.mark.parametrize("secret", [None, SECRET])
def test_on_a_loop_all_mail_comes_in_order_however_much_at_once(secret: str | None) -> None:
    async def run() -> None:
        here = OnLoop(curve_of(secret))
        with Mailbox(curve=curve_of(secret)) as there:
            for epoch in range(2000):  # several times what is read in one turn of the loop
                there.send(here.mailbox.address, Abort(1, epoch))
            got = await here.until(2000)
            assert got == [Mail(there.address, Abort(1, epoch)) for epoch in range(2000)]
            for sender, message in got[:500]:
                assert isinstance(message, Abort)
                here.mailbox.send(sender, Receipt(1, message.epoch, "abort"))
            await asyncio.sleep(0)  # what was said goes when the loop turns
            answers: list[Mail] = []
            while len(answers) < 500:
                fresh = there.wait(5.0)
                assert fresh, "mail stopped coming"
                answers += fresh
            assert [mail.message for mail in answers] == [Receipt(1, n, "abort") for n in range(500)]
        here.mailbox.close()
        here.mailbox.close()

    asyncio.run(run())


def test_on_a_loop_frames_that_came_while_it_was_busy_are_read_to_the_last() -> None:
    """Far more than are read in one turn of the loop. ZeroMQ's descriptor does not tell of the rest."""

    async def run() -> None:
        here = OnLoop()
        await asyncio.sleep(0)
        context = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.connect(parse_address(here.mailbox.address).endpoint)
        for epoch in range(5000):
            socket.send(framed(b"tcp://a:1", encode(Abort(1, epoch))))
        assert await here.until(5000) == [Mail("tcp://a:1", Abort(1, epoch)) for epoch in range(5000)]
        context.destroy(linger=0)
        here.mailbox.close()

    asyncio.run(run())


def test_on_a_loop_mail_comes_one_by_one_too() -> None:
    async def run() -> None:
        here = OnLoop()
        with Mailbox() as there:
            for epoch in range(50):  # each time the loop has gone to sleep
                there.send(here.mailbox.address, Abort(1, epoch))
                await here.until(epoch + 1)
        here.mailbox.close()

    asyncio.run(run())


def test_on_a_loop_garbage_is_counted_and_costs_nothing_else() -> None:
    async def run() -> None:
        here = OnLoop()
        context = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.connect(parse_address(here.mailbox.address).endpoint)
        for garbage in GARBAGE:
            socket.send(garbage)
        socket.send_multipart([framed(b"tcp://a:1", encode(Watch())), b"a second part"])
        socket.send(framed(b"tcp://b:1", encode(Watch()), b"\xc1", encode(Abort(1, 2))))
        expected = [("tcp://a:1", Watch()), ("tcp://b:1", Watch()), ("tcp://b:1", Abort(1, 2))]
        assert await here.until(3) == expected
        assert here.mailbox.rejected_messages == len(GARBAGE) + 2
        context.destroy(linger=0)
        here.mailbox.close()

    asyncio.run(run())


def test_on_a_loop_a_peer_that_is_gone_blocks_nobody() -> None:
    async def run() -> None:
        here = OnLoop()
        first = Mailbox()
        here.mailbox.send(first.address, Watch())
        await asyncio.sleep(0)
        assert first.wait(5.0)
        first.close()
        here.mailbox.send(first.address, Watch())
        await asyncio.sleep(0)
        here.mailbox.send(first.address, Watch())
        here.mailbox.forget(first.address)
        with Mailbox() as second:
            here.mailbox.send(second.address, Watch())
            await asyncio.sleep(0)
            assert second.wait(5.0)
        here.mailbox.close()

    asyncio.run(run())
