"""In a cluster with a secret only members are heard, and each only as itself."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
import zmq

from common.secrets import open_secret
from kvcache.config import KVEventsConfig
from kvcache.publisher import EventPublisher
from tests.support.members import OTHER_SECRET, SECRET, curve_of, member, write_secret
from wire.addresses import parse_address
from wire.codec import encode
from wire.events import AllBlocksCleared
from wire.mailbox import Mailbox
from wire.messages.base import Receipt
from wire.messages.directory import Watch
from wire.messages.rooms import Abort
from wire.security import Curve, curve_for

WAIT_S = 10.0


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, "it did not become true"
        time.sleep(0.01)


def heard(mailbox: Mailbox, count: int) -> list[object]:
    messages: list[object] = []
    deadline = time.monotonic() + WAIT_S
    while len(messages) < count and time.monotonic() < deadline:
        messages += [mail.message for mail in mailbox.wait(0.2)]
    return messages


@contextmanager
def connected(curve: Curve | None, to: str) -> Iterator[zmq.Socket[bytes]]:
    """A PUSH socket of that process."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    push = context.socket(zmq.PUSH)
    push.setsockopt(zmq.SNDTIMEO, 10_000)
    address = parse_address(to)
    if curve is not None:
        curve.connect(push, address)
    push.connect(address.endpoint)
    try:
        yield push
    finally:
        context.destroy(linger=500)


def framed(head: str, proof: bytes, message: bytes) -> bytes:
    text = head.encode()
    return bytes((len(text),)) + text + proof + len(message).to_bytes(4, "little") + message


def test_a_process_with_another_secret_is_not_heard() -> None:
    with Mailbox(curve=curve_of()) as here, Mailbox(curve=curve_of(OTHER_SECRET)) as stranger:
        stranger.send(here.address, Watch(1))
        until(lambda: here.rejected_messages == 1)
        with Mailbox(curve=curve_of()) as friend:
            friend.send(here.address, Watch(2))
            assert heard(here, 1) == [Watch(2)]


def test_a_process_without_a_secret_does_not_even_connect() -> None:
    with Mailbox(curve=curve_of()) as here, connected(None, here.address) as plain:
        plain.send(framed("tcp://127.0.0.1:1", b"", encode(Watch())))
        with Mailbox(curve=curve_of()) as friend:
            friend.send(here.address, Watch(2))
            assert heard(here, 1) == [Watch(2)]
        assert here.rejected_messages == 0


def test_a_member_cannot_speak_with_the_address_of_another() -> None:
    liar = member()
    with Mailbox(curve=curve_of()) as here, Mailbox(curve=curve_of()) as victim:
        victim.send(here.address, Watch(1))
        assert heard(here, 1) == [Watch(1)]
        with connected(liar, here.address) as push:
            push.send(framed(victim.address, liar.proof(victim.address), encode(Abort(1, 2))))
            until(lambda: here.rejected_messages == 1)
            own = liar.address("tcp://127.0.0.1:9")
            push.send(framed(own, liar.proof(own), encode(Receipt(1, 2, "abort"))))
            assert heard(here, 1) == [Receipt(1, 2, "abort")]


def test_a_member_is_no_directory_unless_it_has_the_directorys_key() -> None:
    liar = member()
    claimed = "tcp://127.0.0.1:7000"  # an address without a key is that of a directory at a fixed port
    with Mailbox(curve=curve_of()) as here, connected(liar, here.address) as push:
        push.send(framed(claimed, liar.proof(claimed), encode(Watch())))
        until(lambda: here.rejected_messages == 1)


def test_the_head_of_a_member_is_worth_nothing_on_another_connection() -> None:
    """Someone has seen a frame, and sends it on a connection of its own."""
    owner, thief = member(), member(OTHER_SECRET)
    own = owner.address("tcp://127.0.0.1:9")
    frame = framed(own, owner.proof(own), encode(Watch(3)))
    with (
        Mailbox(curve=curve_of()) as here,
        connected(owner, here.address) as good,
        connected(thief, here.address) as bad,
    ):
        good.send(frame)
        assert heard(here, 1) == [Watch(3)]
        bad.send(frame)
        until(lambda: here.rejected_messages == 1)


def test_a_recorded_connection_is_worth_nothing() -> None:
    """All bytes that a member has sent, handshake and message, are sent again."""
    with Mailbox(curve=curve_of()) as here, Mailbox(curve=curve_of()) as friend:
        endpoint = parse_address(here.address).endpoint.removeprefix("tcp://")
        host, port = endpoint.rsplit(":", 1)
        with Recorder(host, int(port)) as recorder:
            through = f"tcp://127.0.0.1:{recorder.port}/{parse_address(here.address).key}"
            friend.send(through, Watch(1))
            assert heard(here, 1) == [Watch(1)]
            recorded = bytes(recorder.sent)
        assert len(recorded) > 500
        with closing(socket.create_connection((host, int(port)), timeout=5)) as again:
            again.sendall(recorded)
            again.settimeout(10.0)
            while again.recv(65536):
                pass  # the server's side of the handshake, then the end
        friend.send(here.address, Watch(2))
        assert heard(here, 1) == [Watch(2)]


class Recorder:
    """Passes one connection on, and keeps what the client has sent."""

    def __init__(self, host: str, port: int) -> None:
        self.sent = bytearray()
        self._to = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._stop_out, self._stop_in = socket.socketpair()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        client, _ = self._listener.accept()
        with closing(client), closing(socket.create_connection(self._to)) as server:
            while True:
                ready, _, _ = select.select([client, server, self._stop_in], [], [])
                if self._stop_in in ready:
                    return
                for one in ready:
                    data = one.recv(65536)
                    if not data:
                        return
                    if one is client:
                        self.sent += data
                    (server if one is client else client).sendall(data)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_out.send(b"x")
        self._thread.join(timeout=5)
        for one in (self._listener, self._stop_in, self._stop_out):
            one.close()


@pytest.mark.parametrize("reader", [OTHER_SECRET, None])
@pytest.mark.parametrize("kind", [zmq.SUB, zmq.DEALER])
@pytest.mark.parametrize("stream", ["public", "private"])
def test_strangers_read_no_events(stream: str, kind: int, reader: str | None) -> None:
    with EventPublisher(KVEventsConfig(enable=True), curve_of()) as publisher:
        chosen = getattr(publisher, stream)
        address = chosen.address if kind == zmq.SUB else chosen.replay_address
        with reading(kind, reader, address) as stranger, reading(kind, SECRET, address) as friend:
            deadline = time.monotonic() + WAIT_S
            while not friend.poll(50):
                assert time.monotonic() < deadline, "a member reads"
                publisher.publish([AllBlocksCleared()], [AllBlocksCleared()])
                if kind == zmq.DEALER:
                    friend.send_multipart([b"", bytes(8)])
                    with suppress(zmq.Again):  # a refused connection takes nothing
                        stranger.send_multipart([b"", bytes(8)], zmq.NOBLOCK)
            assert not stranger.poll(200)


@contextmanager
def reading(kind: int, secret: str | None, address: str) -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    reader = context.socket(kind)
    if kind == zmq.SUB:
        reader.subscribe(b"")
    publisher = parse_address(address)
    curve = curve_of(secret)
    if curve is not None:
        curve.read(reader, publisher)
    reader.connect(publisher.endpoint)
    try:
        yield reader
    finally:
        context.destroy(linger=0)


# -- another secret --------------------------------------------------------------------------------


def test_a_secret_is_replaced_while_messages_flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New below old, then new above old, then new alone; each process has a file of its own."""
    monkeypatch.setattr("common.secrets._CHECK_S", 0.05)
    files = [write_secret(made(tmp_path, name)) for name in ("one", "other")]
    one, other = (Mailbox(curve=curve_for(open_secret(file))) for file in files)
    with one, other:
        for lines in ((SECRET, OTHER_SECRET), (OTHER_SECRET, SECRET), (OTHER_SECRET,)):
            for file in files:
                write_secret(file.parent, *lines)
                for number in range(8):
                    one.send(other.address, Watch(number))
                    assert heard(other, 1) == [Watch(number)]
                    time.sleep(0.05)  # both look at their files meanwhile
        with Mailbox(curve=curve_of(OTHER_SECRET)) as new, Mailbox(curve=curve_of(SECRET)) as late:
            new.send(other.address, Watch(1))
            assert heard(other, 1) == [Watch(1)]
            late.send(other.address, Watch(2))
            until(lambda: other.rejected_messages == 1)
        assert one.rejected_messages == 0


def test_a_directory_at_a_fixed_port_is_found_with_the_new_secret(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    file = write_secret(tmp_path)
    directory = Mailbox(curve=curve_for(open_secret(file), fixed_address=True), port=port)
    with directory, Mailbox(curve=curve_of()) as old:
        assert directory.address == f"tcp://127.0.0.1:{port}"
        old.send(directory.address, Watch(1))
        assert heard(directory, 1) == [Watch(1)]
        directory.send(old.address, Watch(2))
        assert heard(old, 1) == [Watch(2)]
        write_secret(tmp_path, OTHER_SECRET)
        deadline, got = time.monotonic() + WAIT_S, []
        with Mailbox(curve=curve_of(OTHER_SECRET)) as new:
            while not got:
                assert time.monotonic() < deadline, "the directory speaks the new secret"
                new.send(directory.address, Watch(3))
                got = [mail for mail in directory.wait(0.3) if mail.sender == new.address]
            directory.send(new.address, Watch(4))
            assert heard(new, 1) == [Watch(4)]


def test_both_secrets_of_a_directory_are_tried(tmp_path: Path) -> None:
    """The client has the new one first, the directory does not yet."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    old, new = made(tmp_path, "old"), made(tmp_path, "new")
    of_directory = curve_for(open_secret(write_secret(old, SECRET, OTHER_SECRET)), fixed_address=True)
    of_worker = curve_for(open_secret(write_secret(new, OTHER_SECRET, SECRET)))
    with Mailbox(curve=of_directory, port=port) as directory, Mailbox(curve=of_worker) as worker:
        deadline, got = time.monotonic() + 2 * WAIT_S, []
        while not got:
            assert time.monotonic() < deadline
            worker.send(directory.address, Watch(1))
            got = directory.wait(0.3)


def made(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).mkdir()
    return tmp_path / name
