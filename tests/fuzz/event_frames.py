"""Hostile readers of a worker's KV events, and a hostile publisher of some."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Self

import zmq
from msgspec.structs import replace

from tests.fuzz.attacker import Attacker
from tests.fuzz.findings import Findings
from tests.harness.local_stack import Stack
from wire.addresses import parse_address
from wire.messages.directory import Announce, Withdraw
from wire.records import WorkerRecord

_AT_ONCE = 500
_ANSWER_S = 20.0
_END = (-1).to_bytes(8, "big", signed=True)
_LAST = (2**63 - 1).to_bytes(8, "big")  # a replay from there is empty
_REPLAYED = 20
_ALL_EVENTS = (
    0.002  # of the requests ask for all that is kept: thousands of frames, which take a while to read
)


def send_replay_requests(attacker: Attacker, record: WorkerRecord, count: int, findings: Findings) -> None:
    """Ask a worker's replay socket for what it does not have, in frames that it does not know."""
    with (
        _connect(attacker, record.replay, zmq.DEALER) as honest,
        _connect(attacker, record.replay, zmq.DEALER) as socket,
    ):
        socket.setsockopt(zmq.LINGER, int(_ANSWER_S * 1000))  # all frames are sent before it is closed
        for start in range(0, count, _AT_ONCE):
            frames = min(_AT_ONCE, count - start)
            for _ in range(frames):
                socket.send_multipart(_replay_request(attacker))
            findings.frames += frames
            _discard(socket)
            if not _ends(honest):
                findings.hangs += 1
                findings.tell(f"{record.id} replays no events after {start + frames} frames")
                return


def _discard(socket: zmq.Socket[bytes]) -> None:
    """Drop what has come."""
    with suppress(zmq.Again):
        while True:
            socket.recv_multipart(zmq.NOBLOCK)


def _replay_request(attacker: Attacker) -> list[bytes]:
    draw = attacker.random
    number = draw.choice((_END, bytes(7), b"", bytes(900), draw.randbytes(8), b"\xff" * 8))
    if draw.random() < _ALL_EVENTS:
        return [b"", bytes(8)]
    if draw.random() < 0.3:
        return [b"", number]
    return [attacker.liar.noise()[:900] for _ in range(draw.randrange(1, 5))]


def _ends(socket: zmq.Socket[bytes]) -> bool:
    """Ask for an empty replay. Whether its end came."""
    socket.send_multipart([b"", _LAST])
    return bool(socket.poll(int(_ANSWER_S * 1000))) and socket.recv_multipart()[-2:-1] == [_END]


def send_subscriptions(
    attacker: Attacker, record: WorkerRecord, running: Stack, count: int, findings: Findings
) -> None:
    """Subscribe to a worker's events in ways that nobody would. It reads them when it publishes."""
    with _connect(attacker, record.events, zmq.XSUB) as socket:
        deadline = time.monotonic() + _ANSWER_S
        sent = 0
        while sent < count and time.monotonic() < deadline:
            try:
                socket.send(_subscription(attacker), zmq.NOBLOCK)
            except zmq.Again:
                prompt = [attacker.random.randrange(256) for _ in range(40)]
                running.generate(prompt, 1)  # its pages are published
            else:
                sent += 1
                deadline = time.monotonic() + _ANSWER_S
        findings.frames += sent
        if sent < count:
            findings.hangs += 1
            findings.tell(f"{record.id} has read only {sent} subscriptions")


def _subscription(attacker: Attacker) -> bytes:
    draw = attacker.random
    topic = draw.choice((b"", b"kv-events", b"x" * 900, draw.randbytes(2)))
    return draw.choice((b"\1", b"\0", b"\0", b"\2", b"")) + topic


class HostilePublisher:
    """A worker that takes no requests and publishes nonsense, which the router follows."""

    def __init__(self, attacker: Attacker, like: WorkerRecord, directory: str) -> None:
        """`like`: the record of an honest worker; it must have the same layouts."""
        self._attacker = attacker
        self._pub, events = self._bind(zmq.PUB)
        self._replay, replay = self._bind(zmq.ROUTER)
        self._record = replace(
            like, id="liar", incarnation=time.time_ns(), draining=True,
            mailbox=attacker.address, events=events, replay=replay,
        )  # fmt: skip
        self._directory = attacker.connect(directory)
        self._number = 0

    def publish(self, count: int, findings: Findings) -> None:
        """Publish so many frames. The router must go on asking for replays."""
        sent = 0
        while sent < count:
            self._directory.send(self._attacker.frame_of(Announce(self._record)))
            if not self._replay.poll(int(_ANSWER_S * 1000)):
                findings.hangs += 1
                findings.tell(f"the router does not follow events after {sent} frames")
                return
            now = self._answer()
            for _ in range(_AT_ONCE):
                self._pub.send_multipart([self._attacker.liar.noise()[:20], *self._numbered()])
            now += _AT_ONCE
            sent += now
            findings.frames += now

    def close(self) -> None:
        """Leave, and wait until that is known."""
        self._directory.send(self._attacker.frame_of(Withdraw(self._record.id, self._record.incarnation)))
        for socket in (self._directory, self._pub, self._replay):
            socket.close(linger=1000)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> int:
        """Answer all requests for replays that are there. Returns the number of frames."""
        sent = 0
        while self._replay.poll(0):
            peer, *_ = self._replay.recv_multipart()
            for _ in range(_REPLAYED):
                self._replay.send_multipart([peer, b"", b"kv-events", *self._numbered()])
            if self._attacker.random.random() < 0.7:
                self._replay.send_multipart([peer, b"", b"", _END, b""])
            sent += _REPLAYED
        return sent

    def _numbered(self) -> list[bytes]:
        """A sequence number, mostly the next, and a batch; or frames of other numbers and sizes."""
        draw = self._attacker.random
        chance = draw.random()
        if chance < 0.1:
            return [draw.randbytes(draw.randrange(50)) for _ in range(draw.randrange(4))]
        if chance < 0.9:
            self._number += 1
            number = self._number.to_bytes(8, "big")
        else:
            number = draw.choice((bytes(8), b"\xff" * 8, draw.randbytes(8), b"1"))
        return [number, self._attacker.liar.events()]

    def _bind(self, kind: int) -> tuple[zmq.Socket[bytes], str]:
        socket = self._attacker.context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0)
        curve = self._attacker.curve
        if curve is not None:
            curve.serve(socket)
        socket.bind("tcp://127.0.0.1:*")
        endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        return socket, endpoint if curve is None else curve.address(endpoint)


def _connect(attacker: Attacker, address: str, kind: int) -> zmq.Socket[bytes]:
    """As a reader of events."""
    socket = attacker.context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    publisher = parse_address(address)
    if attacker.curve is not None:
        attacker.curve.read(socket, publisher)
    socket.connect(publisher.endpoint)
    return socket
