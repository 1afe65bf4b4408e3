"""A writer that does not end its write as it should, and goes on living: this process."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest
import torch

from common.errors import ConfigError, TransferError
from kvcache.page_runs import as_pages
from kvtransfer.channel import Channel, Line
from kvtransfer.frames import End
from kvtransfer.mooncake_engine import MooncakeEngine
from kvtransfer.pages import PageWrite
from kvtransfer.receiver import KVReceiver, PoolReceiver
from kvtransfer.region import GroupRegion
from kvtransfer.select import open_receiver, open_sender
from kvtransfer.tcp import connected_socket
from kvtransfer.transport import Bounds
from tests.kvtransfer.peers import receiving
from tests.kvtransfer.stand_in_copies import StandInCopies
from wire.messages.transfer import GroupTarget, KVDone

PAGES = as_pages([1, 2])
WRITE = PageWrite(1, 0, "full", PAGES, PAGES)


def channel_to(receiver: PoolReceiver) -> Channel:
    """A new connection."""
    (endpoint,) = receiver.endpoints
    if endpoint.backend in ("tcp", "mooncake"):
        sock = connected_socket(endpoint.address, Bounds())
    else:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect("\0" + endpoint.address.removeprefix("@"))
    return Channel(Line(sock), endpoint, Bounds())


def granted(receiver: PoolReceiver) -> Channel:
    """A connection on which the write was granted."""
    channel = channel_to(receiver)
    channel.begin(WRITE, 64)
    return channel


@pytest.mark.parametrize("backend", ["cuda_ipc", "shm", "tcp"])
def test_a_write_that_failed_has_not_landed(backend: str) -> None:
    with receiving(backend, 4, 64) as (receiver, _):
        receiver.open(1, 0, {"full": PAGES})
        with closing(granted(receiver)) as channel:
            if backend == "tcp":
                channel.stream.sock.sendall(bytes(128))
            channel.stream.send(End(landed=False))
            channel.expect_ended()
        assert receiver.landed(1, 0).missing == {"full": 2}
        assert receiver.close_room(1, 0).passed


def test_a_write_that_broke_off_has_not_landed() -> None:
    with receiving("tcp", 4, 64) as (receiver, _):
        receiver.open(1, 0, {"full": PAGES})
        channel = granted(receiver)
        channel.stream.sock.sendall(bytes(64))
        channel.close()
        with closing(granted(receiver)) as again:  # the first one is over when this one has landed
            again.stream.sock.sendall(bytes(128))
            again.end()
        assert receiver.landed(1, 0).nbytes == {"full": 128}


@pytest.mark.parametrize("backend", ["cuda_ipc", "shm"])
def test_a_broken_connection_is_no_fence_while_the_writer_lives(backend: str) -> None:
    with receiving(backend, 4, 64) as (receiver, _):
        receiver.open(1, 0, {"full": PAGES})
        granted(receiver).close()
        assert not receiver.close_room(1, 0).wait(1.0)


@pytest.mark.parametrize("backend", ["cuda_ipc", "shm"])
def test_a_write_that_may_go_on_is_no_fence_while_the_writer_lives(backend: str) -> None:
    with receiving(backend, 4, 64) as (receiver, _):
        receiver.open(1, 0, {"full": PAGES})
        with closing(granted(receiver)) as channel:
            channel.stream.send(End(landed=False, certain=False))
            assert not receiver.close_room(1, 0).wait(1.0)


def test_over_tcp_the_fence_waits_for_nothing_that_a_silent_writer_does() -> None:
    with receiving("tcp", 4, 64, Bounds(silence_s=60.0)) as (receiver, _):
        receiver.open(1, 0, {"full": PAGES})
        with closing(granted(receiver)):
            assert receiver.close_room(1, 0).wait(20.0)


def test_a_room_is_not_committed_while_a_peer_writes_to_it() -> None:
    with receiving("shm", 4, 64) as (receiver, _):
        kv = KVReceiver(receiver, 1, 0, 10, {"full": GroupTarget(0, PAGES.tolist())})
        with closing(granted(receiver)) as first:
            first.end()
        with closing(granted(receiver)) as second:
            with pytest.raises(TransferError, match="still writing"):
                kv.commit(KVDone(1, 0, 10, 0, 128))
            second.end()
        assert kv.abort().passed


@pytest.mark.parametrize(("backend", "late_waits"), [("tcp", 1), ("tcp", 99), ("mooncake", 99)])
def test_the_fence_of_a_pool_on_a_device_waits_for_late_copies(backend: str, late_waits: int) -> None:
    """After the first wait that is too long, the next one sees the end of the copy, or none does."""
    copies = StandInCopies(late=True)
    there = GroupRegion(torch.zeros((8, 64), dtype=torch.uint8), copies=copies)
    here = GroupRegion(torch.full((8, 64), 7, dtype=torch.uint8))
    with (
        closing(open_receiver({"full": there}, backend)) as receiver,
        closing(open_sender({"full": here}, "here", backend)) as sender,
    ):
        receiver.open(1, 0, {"full": PAGES})
        copies.late_waits = late_waits
        with pytest.raises(TransferError):
            sender.write(receiver.endpoints[0], WRITE)
        fence = receiver.close_room(1, 0)
        assert fence.passed is (late_waits == 1)
        assert fence.passed is not bool(copies.queued), "nothing is queued once the fence has passed"


def test_a_write_for_which_no_staging_buffer_can_be_registered_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Locked memory may run out while a worker runs. The room's pages must not stay out of use for ever."""
    with receiving("mooncake", 4, 64) as (receiver, _):

        def refuse(self: MooncakeEngine, ptr: int, nbytes: int) -> None:
            raise ConfigError("kv_transfer_backend", f"Mooncake cannot register {nbytes} bytes", "use tcp")

        monkeypatch.setattr(MooncakeEngine, "register", refuse)
        receiver.open(1, 0, {"full": PAGES})
        with closing(channel_to(receiver)) as channel, pytest.raises(TransferError):
            channel.begin(WRITE, 64)
        assert receiver.close_room(1, 0).wait(5.0)
