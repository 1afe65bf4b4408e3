"""The publisher, read with plain zmq and msgpack."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgpack
import pytest
import zmq

from kvcache.config import KVEventsConfig
from kvcache.event_stream import EventStream
from kvcache.publisher import EventPublisher
from tests.support.members import SECRET, curve_of
from wire.addresses import parse_address
from wire.events import AllBlocksCleared, BlockRemoved, encode_batch
from wire.security import Curve

Connect = Callable[..., "zmq.Socket[bytes]"]


@pytest.fixture
def connect() -> Iterator[Connect]:
    context = zmq.Context()
    sockets = []

    def connected(kind: int, address: str, curve: Curve | None = None) -> zmq.Socket[bytes]:
        socket = context.socket(kind)
        sockets.append(socket)
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        socket.setsockopt(zmq.RCVHWM, 0)
        if kind == zmq.SUB:
            socket.subscribe(b"")
        publisher = parse_address(address)
        if curve is not None:
            curve.read(socket, publisher)
        socket.connect(publisher.endpoint)
        return socket

    yield connected
    for socket in sockets:
        socket.close(linger=0)
    context.term()


def replay(socket: zmq.Socket, start: int) -> list[tuple[int, bytes]]:
    socket.send_multipart([b"", start.to_bytes(8, "big")])
    got = []
    while True:
        empty, topic, number, payload = socket.recv_multipart()
        assert empty == b""
        if number == (-1).to_bytes(8, "big", signed=True):
            assert (topic, payload) == (b"", b"")
            return got
        assert topic == b"kv-events"
        got.append((int.from_bytes(number, "big"), payload))


def numbers_until(socket: zmq.Socket, last: int) -> list[int]:
    """Numbers of the first replay that reaches `last`: publishing is asynchronous."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        numbers = [number for number, _ in replay(socket, 0)]
        if numbers and numbers[-1] >= last:
            return numbers
    raise AssertionError(f"batch {last} was never published")


@pytest.mark.parametrize("secret", [None, SECRET])
def test_batches_are_numbered_and_can_be_replayed(connect: Connect, secret: str | None) -> None:
    curve = curve_of(secret)
    with EventPublisher(KVEventsConfig(enable=True), curve) as publisher:
        sub = connect(zmq.SUB, publisher.public.address, curve)
        dealer = connect(zmq.DEALER, publisher.public.replay_address, curve)
        publisher.publish([])
        publisher.publish([AllBlocksCleared()])
        assert [number for number, _ in replay(dealer, 0)] == [0]
        number = 0
        while not sub.poll(100):  # a subscription takes effect some time after connecting
            number += 1
            assert number < 100, "the subscription never took effect"
            publisher.publish([BlockRemoved([number], "GPU")])
        topic, sequence, payload = sub.recv_multipart()
        seen = int.from_bytes(sequence, "big")
        assert topic == b"kv-events"
        removed = {"type": "BlockRemoved", "block_hashes": [seen], "medium": "GPU"}
        sent = removed if seen else {"type": "AllBlocksCleared"}  # the subscription may be that quick
        assert msgpack.unpackb(payload)[1:] == [[sent], 0]
        start = min(seen, 1)
        missed = replay(dealer, start)
        assert [number for number, _ in missed][: seen + 1 - start] == list(range(start, seen + 1))
        assert dict(missed)[seen] == payload


def test_a_start_too_old_begins_with_the_oldest_kept(connect: Connect) -> None:
    with EventPublisher(KVEventsConfig(enable=True, buffer_batches=3)) as publisher:
        for number in range(5):
            publisher.publish([BlockRemoved([number], "GPU")])
        dealer = connect(zmq.DEALER, publisher.public.replay_address)
        assert numbers_until(dealer, 4) == [2, 3, 4]


def test_what_is_kept_is_bounded_in_bytes_too(connect: Connect) -> None:
    sizes = [len(encode_batch(0.0, [BlockRemoved([number], "GPU")])) for number in range(3)]
    assert len(set(sizes)) == 1
    config = KVEventsConfig(enable=True, buffer_bytes=3 * sizes[0])
    with EventPublisher(config) as publisher:
        for number in range(5):
            publisher.publish([BlockRemoved([number], "GPU")])
        dealer = connect(zmq.DEALER, publisher.public.replay_address)
        assert numbers_until(dealer, 4) == [2, 3, 4]
        publisher.publish([BlockRemoved(list(range(5, 10)), "GPU")])  # takes the place of two
        assert numbers_until(dealer, 5) == [4, 5]


def test_a_malformed_request_is_ignored_and_the_next_is_answered(connect: Connect) -> None:
    with EventPublisher(KVEventsConfig(enable=True)) as publisher:
        dealer = connect(zmq.DEALER, publisher.public.replay_address)
        dealer.send_multipart([b"nonsense"])
        dealer.send_multipart([b"", b"short"])
        assert replay(dealer, 0) == []


def test_a_restart_binds_fresh_ports_and_closing_twice_is_fine() -> None:
    config = KVEventsConfig(enable=True)
    with EventPublisher(config) as first, EventPublisher(config) as second:
        streams = (first.public, first.private, second.public, second.private)
        assert len({address for one in streams for address in (one.address, one.replay_address)}) == 8
    first.close()


def test_public_and_private_events_have_streams_of_their_own(connect: Connect) -> None:
    """Each has its numbers, its buffer and its subscribers; a gap in one is none in the other."""
    with EventPublisher(KVEventsConfig(enable=True, buffer_batches=3)) as publisher:
        public, private = (connect(zmq.DEALER, one.replay_address) for one in streams_of(publisher))
        for number in range(5):
            publisher.publish([BlockRemoved([number], "GPU")])
        publisher.publish([], [BlockRemoved([-1], "GPU")])
        publisher.publish([BlockRemoved([5], "GPU")], [BlockRemoved([-2], "GPU")])
        assert numbers_until(public, 5) == [3, 4, 5]
        assert numbers_until(private, 1) == [0, 1]
        for dealer, sign in ((public, 1), (private, -1)):
            for _, payload in replay(dealer, 0):
                assert all(event["block_hashes"][0] * sign > 0 for event in msgpack.unpackb(payload)[1])


def streams_of(publisher: EventPublisher) -> tuple[EventStream, EventStream]:
    return publisher.public, publisher.private


def test_the_full_buffer_is_replayed_whole(connect: Connect) -> None:
    with EventPublisher(KVEventsConfig(enable=True)) as publisher:
        for number in range(10_500):
            publisher.publish([BlockRemoved([number], "GPU")])
        dealer = connect(zmq.DEALER, publisher.public.replay_address)
        assert numbers_until(dealer, 10_499) == list(range(500, 10_500))
