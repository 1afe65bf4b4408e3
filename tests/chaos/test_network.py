"""The fault injector itself: what is cut does not pass, what is lossy is counted."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest
import zmq

from tests.chaos.faults import Faults
from tests.chaos.launcher import NetworkClient
from tests.chaos.network import Network
from tests.chaos.zmtp import messages_in, read_unit
from wire.messages.directory import Watch
from wire.sockets import PeerSockets

_BOUND_S = 10.0


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network() as running:
        yield running


def test_a_cut_link_passes_nothing_until_it_is_healed(network: Network) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = "{}:{}".format(*server.getsockname())
        NetworkClient(network.address, "D/0").bound(address)
        host, _, port = NetworkClient(network.address, "P/0").way(address, is_zmq=False).rpartition(":")
        with socket.create_connection((host, int(port)), _BOUND_S) as there:
            here, _ = server.accept()
            with here:
                here.settimeout(_BOUND_S)
                there.sendall(b"one")
                assert here.recv(3) == b"one"
                network.faults.cut("P/0", "D/0")
                there.sendall(b"two")
                here.settimeout(0.3)
                with pytest.raises(TimeoutError):
                    here.recv(3)
                network.faults.heal()
                here.settimeout(_BOUND_S)
                assert here.recv(3) == b"two"
                assert network.faults.disturbed["P"] == 1


def test_a_mailboxs_frame_is_taken_apart_into_its_messages() -> None:
    context = zmq.Context()
    inbound = context.socket(zmq.PULL)
    inbound.bind("tcp://127.0.0.1:*")
    address = inbound.getsockopt_string(zmq.LAST_ENDPOINT)
    sockets = PeerSockets(context, "tcp://127.0.0.1:1", None, lambda *_: None)
    for _ in range(3):
        sockets.send(address, Watch())
    sockets.flush()
    assert inbound.poll(int(_BOUND_S * 1e3))
    assert messages_in(inbound.recv()) == 3
    assert messages_in(b"anything else") == 1
    sockets.close()
    context.destroy(linger=0)


def test_units_are_whole_messages_or_commands() -> None:
    async def read(data: bytes) -> list[tuple[bytes, bool]]:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        found = []
        while not reader.at_eof():
            unit = await read_unit(reader)
            found.append((unit.payload, unit.is_command))
        return found

    long = b"x" * 300
    data = b"\x04\x02hi" + b"\x01\x01a\x02" + len(long).to_bytes(8, "big") + long
    assert asyncio.run(read(data)) == [(b"hi", True), (long, False)]


def test_what_is_lossy_is_dropped_doubled_and_delayed_and_counted() -> None:
    faults = Faults(seed=1)
    assert faults.delays("P/0", "D/0", 1) == [0.0]
    faults.lose("D/0")
    seen = [faults.delays("P/0", "D/0", 1) for _ in range(400)]
    assert {len(delays) for delays in seen} == {0, 1, 2}
    assert any(late > 0 for delays in seen for late in delays)
    assert faults.disturbed["P"] == sum(delays != [0.0] for delays in seen)
    faults.heal()
    faults.slow("P/0", 0.5)
    assert faults.delays("D/0", "P/0", 2) == [0.5]
    assert faults.delays("D/0", "P/1", 2) == [0.0]
