"""Peers without the token, with malformed frames or silent; and no resources left behind."""

from __future__ import annotations

import gc
import os
import socket
import struct
import threading

import numpy as np
import pytest

from common.errors import TransferError
from common.host import host_identity
from kvtransfer.channel import GrantedWrite, Peer
from kvtransfer.frames import Challenge, bound, proof_of, receive_frame
from kvtransfer.pages import PageWrite
from kvtransfer.select import open_sender
from kvtransfer.tcp import TcpSender
from kvtransfer.transport import Bounds
from tests.kvtransfer.peers import pool, receiving
from wire.messages.transfer import TransferEndpoint

QUICK = Bounds(connect_s=1.0, greeting_s=0.5, silence_s=0.5, write_s=5.0)
BACKENDS = ["shm", "tcp", "mooncake"]
WRITE = PageWrite(1, 0, "full", np.arange(1, 3), np.arange(1, 3))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrong_token_gets_nothing(backend: str) -> None:
    with receiving(backend, 4, 64, QUICK) as (receiver, data):
        receiver.open(1, 0, {"full": np.arange(1, 3)})
        true = receiver.endpoints[0]
        wrong = TransferEndpoint(true.backend, true.address, {**true.params, "token": "guess"})
        sender = open_sender({"full": pool(4, 64, 1)}, host_identity(), backend, bounds=QUICK)
        with pytest.raises(TransferError):
            sender.write(wrong, WRITE)
        assert int(data.count_nonzero()) == 0
        assert sender.write(true, WRITE) == 128, "and nobody else is bothered"
        sender.close()


def test_a_proof_answers_its_own_challenge_only() -> None:
    assert proof_of("token", b"one", b"mine") != proof_of("token", b"another", b"mine")
    assert proof_of("token", b"one", b"mine") != proof_of("token", b"one", b"yours")


def test_nonsense_and_huge_frames_drop_the_stranger_only() -> None:
    with receiving("tcp", 4, 64, QUICK) as (receiver, _):
        host, _, port = receiver.endpoints[0].address.rpartition(":")
        for garbage in (struct.pack("<I", 1 << 31), struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1", b""):
            with socket.create_connection((host, int(port))) as sock:
                bound(sock, 30.0)
                assert isinstance(receive_frame(sock), Challenge)
                sock.sendall(garbage)
                with pytest.raises(TransferError, match=r"closed|broke"):
                    receive_frame(sock)
        receiver.open(1, 0, {"full": np.arange(1, 3)})
        sender = open_sender({"full": pool(4, 64, 1)}, host_identity(), "tcp", bounds=QUICK)
        assert sender.write(receiver.endpoints[0], WRITE) == 128
        sender.close()


def test_a_receiver_that_never_answers_fails_the_write() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        sender = open_sender({"full": pool(4, 64, 1)}, host_identity(), "tcp", bounds=QUICK)
        with pytest.raises(TransferError, match="silent"):
            sender.write(TransferEndpoint("tcp", f"{host}:{port}"), WRITE)
        sender.close()


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_left_behind(backend: str) -> None:
    """Descriptors, threads, mappings and listening ports are as before, idle connections included."""
    _once(backend)  # libraries keep a few things for good once loaded
    before = _holdings()
    for _ in range(3):
        _once(backend)
    assert _holdings() == before


def test_a_drained_peer_is_unmapped() -> None:
    with receiving("shm", 4, 4096) as (receiver, _):
        sender = open_sender({"full": pool(4, 4096, 1)}, host_identity(), "shm", bounds=QUICK)
        receiver.open(1, 0, {"full": np.arange(1, 3)})
        before = _mapped()
        sender.write(receiver.endpoints[0], WRITE)
        assert _mapped() == before + 1
        sender.drain(receiver.endpoints[0])
        assert _mapped() == before
        assert sender.write(receiver.endpoints[0], WRITE) == 8192, "it can be met again"
        sender.close()
        assert _mapped() == before
        with pytest.raises(TransferError, match="closed"):
            sender.write(receiver.endpoints[0], WRITE)


def _once(backend: str) -> None:
    with receiving(backend, 4, 64) as (receiver, _):
        receiver.open(1, 0, {"full": np.arange(1, 3)})
        sender = open_sender({"full": pool(4, 64, 1)}, host_identity(), backend)
        sender.write(receiver.endpoints[0], WRITE)
        sender.close()


def _holdings() -> tuple[int, int, int, list[str]]:
    gc.collect()
    return (
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        _mapped(),
        sorted(os.listdir("/dev/shm")),
    )


def _named() -> list[str]:
    """Named shared memory: Baton must leave none."""
    return [name for name in os.listdir("/dev/shm") if "baton" in name]


def _mapped() -> int:
    with open("/proc/self/maps") as maps:
        return sum("baton-kv" in line for line in maps)


class HeldSender(TcpSender):
    """Every write waits, with its grant, for `gate`."""

    def __init__(self) -> None:
        super().__init__({"full": pool(4, 64, 1)}, QUICK)
        self.gate, self.entered = threading.Event(), threading.Event()
        self.detached = 0

    def _move(self, granted: GrantedWrite) -> None:
        self.entered.set()
        assert self.gate.wait(10)
        super()._move(granted)

    def _detach(self, peer: Peer) -> None:
        self.detached += 1


def test_a_peer_is_let_go_after_the_last_write_to_it() -> None:
    """Its pools stay mapped while a write stores into them."""
    with receiving("tcp", 4, 64) as (receiver, _):
        receiver.open(1, 0, {"full": np.arange(1, 3)})
        sender, (endpoint,) = HeldSender(), receiver.endpoints
        writing = threading.Thread(target=sender.write, args=(endpoint, WRITE))
        writing.start()
        assert sender.entered.wait(10)
        sender.drain(endpoint)
        assert sender.detached == 0
        sender.gate.set()
        writing.join(10)
        assert sender.detached == 1
        sender.close()
