"""Strangers at a receiver's door: however many come and whatever they do, a peer with the token gets in."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from common.errors import TransferError
from common.host import host_identity
from kvtransfer import greeting, listener
from kvtransfer.channel import Channel, Line
from kvtransfer.frames import Challenge, End, Hello, bound, encode_frame, proof_of, receive_frame, send_frame
from kvtransfer.pages import PageWrite
from kvtransfer.receiver import PoolReceiver
from kvtransfer.select import open_sender
from kvtransfer.transport import Bounds
from tests.kvtransfer.peers import pool, receiving
from wire.messages.transfer import TransferEndpoint

QUICK = Bounds(connect_s=5.0, greeting_s=1.0, silence_s=10.0, write_s=20.0)
LONG = Bounds(connect_s=5.0, greeting_s=600.0, silence_s=10.0, write_s=20.0)
BACKENDS = ["shm", "tcp"]
LENGTH = struct.Struct("<I")
END_S = 60.0


def knock(endpoint: TransferEndpoint) -> socket.socket:
    """A connection that has said nothing yet."""
    if endpoint.backend == "shm":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bound(sock, END_S)
        try:
            sock.connect("\0" + endpoint.address.removeprefix("@"))
        except OSError:
            sock.close()
            raise
        return sock
    host, _, port = endpoint.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=END_S)


def challenged(endpoint: TransferEndpoint) -> tuple[socket.socket, Challenge]:
    sock = knock(endpoint)
    bound(sock, END_S)
    challenge = receive_frame(sock)
    assert isinstance(challenge, Challenge)
    return sock, challenge


def wait_dropped(sock: socket.socket) -> None:
    """The receiver hangs up."""
    sock.settimeout(END_S)
    with suppress(ConnectionResetError):
        while sock.recv(4096):
            pass


def write_once(receiver: PoolReceiver, room: int) -> None:
    """A new sender, over a new connection, writes two pages of a new room."""
    receiver.open(room, 0, {"full": np.arange(1, 3)})
    endpoint = receiver.endpoints[0]
    source = {"full": pool(4, 64, 1)}
    with closing(open_sender(source, host_identity(), endpoint.backend, bounds=QUICK)) as sender:
        assert sender.write(endpoint, PageWrite(room, 0, "full", np.arange(1, 3), np.arange(1, 3))) == 128
    assert receiver.close_room(room, 0).passed


@contextmanager
def thousand_hands(endpoint: TransferEndpoint, hands: int) -> Iterator[list[int]]:
    """Threads that connect as fast as they can, keep the last 50 connections each, and say nothing. Yields
    the number of connections of each."""
    stop, counts = threading.Event(), [0] * hands

    def flood(number: int) -> None:
        held: list[socket.socket] = []
        while not stop.is_set():
            with suppress(OSError):
                held.append(knock(endpoint))
                counts[number] += 1
            if len(held) > 50:
                held.pop(0).close()
        for sock in held:
            sock.close()

    threads = [threading.Thread(target=flood, args=(number,)) for number in range(hands)]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        stop.set()
        for thread in threads:
            thread.join(END_S)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_silent_by_the_hundred_keep_nobody_out(backend: str) -> None:
    with receiving(backend, 4, 64, LONG) as (receiver, _), ExitStack() as strangers:
        threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
        silent = [strangers.enter_context(knock(receiver.endpoints[0])) for _ in range(300)]
        write_once(receiver, 1)
        wait_dropped(silent[0])  # the oldest, though its time is not over
        assert threading.active_count() <= threads + 1, "a stranger has no thread"
        write_once(receiver, 2)
        there = len(os.listdir("/proc/self/fd")) - descriptors - len(silent)
        assert there <= 130, "strangers beyond the bound have no descriptor"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stranger_has_a_short_time_however_it_uses_it(backend: str) -> None:
    with receiving(backend, 4, 64, QUICK) as (receiver, _), ExitStack() as strangers:
        endpoint = receiver.endpoints[0]
        began = time.monotonic()
        silent, half, slow = (strangers.enter_context(challenged(endpoint)[0]) for _ in range(3))
        half.sendall(LENGTH.pack(100) + b"half")
        with suppress(OSError):
            slow.settimeout(0.1)
            for byte in LENGTH.pack(100) + bytes(100):
                slow.sendall(bytes([byte]))
                with suppress(TimeoutError):
                    if not slow.recv(1):
                        break
        for sock in (silent, half, slow):
            wait_dropped(sock)
        assert time.monotonic() - began >= QUICK.greeting_s, "not dropped before their time"
        write_once(receiver, 1)


@pytest.mark.parametrize(
    "said",
    [
        LENGTH.pack((1 << 32) - 1),
        LENGTH.pack(0),
        LENGTH.pack(257) + bytes(257),
        LENGTH.pack(4) + b"\xc1\xc1\xc1\xc1",
        LENGTH.pack(200) + b"\x91" * 200,
        LENGTH.pack(12) + msgspec.msgpack.encode({"type": "end"})[:12].ljust(12, b"\0"),
    ],
    ids=["4 GiB", "nothing", "too long", "no MessagePack", "deep", "no Hello"],
)
def test_a_hello_that_is_none_is_dropped_at_once(said: bytes) -> None:
    with receiving("tcp", 4, 64, LONG) as (receiver, _):
        sock, _ = challenged(receiver.endpoints[0])
        with sock:
            sock.sendall(said)
            wait_dropped(sock)
        write_once(receiver, 1)


def test_a_hello_answers_one_challenge() -> None:
    with receiving("tcp", 4, 64, LONG) as (receiver, _):
        endpoint = receiver.endpoints[0]
        first, challenge = challenged(endpoint)
        hello = Hello(proof_of(endpoint.params["token"], challenge.nonce, bytes(16)), bytes(16))
        data = encode_frame(hello)
        second, _ = challenged(endpoint)
        with first, second:
            second.sendall(LENGTH.pack(len(data)) + data)
            wait_dropped(second)
            first.sendall(LENGTH.pack(len(data)) + data)
            receive_frame(first)  # the pools


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_flood_keeps_nobody_out(backend: str) -> None:
    with (
        receiving(backend, 4, 64, LONG) as (receiver, _),
        thousand_hands(receiver.endpoints[0], hands=4) as counts,
    ):
        room = 0
        while room < 10 or sum(counts) < 500:
            room += 1
            write_once(receiver, room)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_peer_that_is_dropped_before_it_says_hello_knocks_again(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_MAX_STRANGERS", 1)
    with receiving(backend, 4, 64, LONG) as (receiver, _), ExitStack() as strangers:
        knocks = 0

        def late(*said: Any) -> bytes:
            nonlocal knocks
            knocks += 1
            if knocks < 4:
                sock, _ = challenged(receiver.endpoints[0])  # when it is greeted, the peer has been dropped
                strangers.enter_context(sock)
            return proof_of(*said)

        monkeypatch.setattr(greeting, "proof_of", late)
        write_once(receiver, 1)
        assert knocks == 4


def test_a_hostile_thousand_leaves_nothing_behind() -> None:
    with receiving("tcp", 4, 64, QUICK) as (receiver, _):
        write_once(receiver, 1)
        endpoint = receiver.endpoints[0]
        threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
        rng = np.random.default_rng(0)
        for i in range(1000):
            with knock(endpoint) as sock:
                kind = i % 4
                with suppress(OSError):
                    if kind == 1:
                        sock.sendall(rng.bytes(int(rng.integers(1, 300))))
                    elif kind == 2:
                        sock.sendall(LENGTH.pack(int(rng.integers(0, 1 << 32))))
                    elif kind == 3:
                        data = encode_frame(Hello(rng.bytes(32), rng.bytes(16)))
                        sock.sendall(LENGTH.pack(len(data)) + data)
        write_once(receiver, 2)
        deadline = time.monotonic() + END_S
        while (
            threading.active_count() > threads or len(os.listdir("/proc/self/fd")) > descriptors
        ) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert threading.active_count() <= threads
        assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_a_wrong_token_is_refused_and_not_tried_for_ever() -> None:
    with receiving("tcp", 4, 64, QUICK) as (receiver, _):
        true = receiver.endpoints[0]
        wrong = TransferEndpoint(true.backend, true.address, {**true.params, "token": "guess"})
        source = {"full": pool(4, 64, 1)}
        with (
            closing(open_sender(source, host_identity(), "tcp", bounds=QUICK)) as sender,
            pytest.raises(TransferError),
        ):
            sender.write(wrong, PageWrite(1, 0, "full", np.arange(1, 3), np.arange(1, 3)))
        write_once(receiver, 1)


# -- more peers than there is room for ------------------------------------------------------------------


def begun(receiver: PoolReceiver, room: int, page: int, senders: ExitStack) -> Channel:
    """A peer in the middle of a write."""
    endpoint, pages = receiver.endpoints[0], np.array([page])
    receiver.open(room, 0, {"full": pages})
    channel = senders.enter_context(closing(Channel(Line(knock(endpoint)), endpoint, QUICK)))
    channel.begin(PageWrite(room, 0, "full", pages, pages), 64)
    return channel


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_peer_that_has_been_idle_longest_gives_way_to_another(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_MAX_PEERS", 2)
    pages, source = np.arange(1, 3), {"full": pool(4, 64, 1)}
    with receiving(backend, 4, 64, QUICK) as (receiver, _), ExitStack() as senders:
        endpoint = receiver.endpoints[0]
        begun(receiver, 99, 3, senders)
        opened = [
            senders.enter_context(closing(open_sender(source, host_identity(), backend, bounds=QUICK)))
            for _ in range(3)
        ]
        for room, sender in enumerate(opened * 2):
            receiver.open(room, 0, {"full": pages})
            assert sender.write(endpoint, PageWrite(room, 0, "full", pages, pages)) == 128
            assert receiver.close_room(room, 0).passed
        assert len(receiver.grants(99, 0)) == 1, "who writes is not dropped"


def give_up(channel: Channel) -> None:
    channel.stream.send(End(landed=False))
    channel.close()


@pytest.mark.parametrize("ends", [give_up, Channel.end], ids=["leaves", "becomes idle"])
def test_a_peer_waits_while_all_places_are_taken_by_peers_that_write(
    ends: Callable[[Channel], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_MAX_PEERS", 2)
    with receiving("shm", 6, 64, QUICK) as (receiver, _), ExitStack() as senders:
        first, _ = (begun(receiver, room, page, senders) for room, page in ((98, 3), (99, 4)))
        other = threading.Thread(target=write_once, args=(receiver, 1))
        other.start()
        other.join(0.2)
        assert other.is_alive(), "it has no place"
        ends(first)
        other.join(END_S)
        assert not other.is_alive()
        assert len(receiver.grants(99, 0)) == 1, "who writes is not dropped"


def test_a_peer_does_not_wait_longer_than_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_MAX_PEERS", 1)
    bounds = replace(QUICK, silence_s=0.2)
    with receiving("shm", 6, 64, bounds) as (receiver, _), ExitStack() as senders:
        endpoint = receiver.endpoints[0]
        busy = begun(receiver, 99, 4, senders)
        with pytest.raises(TransferError):
            Channel(Line(knock(endpoint)), endpoint, bounds)
        sock, challenge = challenged(endpoint)
        senders.enter_context(sock)
        send_frame(sock, Hello(proof_of(endpoint.params["token"], challenge.nonce, bytes(16)), bytes(16)))
        sock.settimeout(0.3)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        busy.end()
        wait_dropped(sock)
        write_once(receiver, 1)
