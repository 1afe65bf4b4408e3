"""tcp: page bytes over one stream per writer, from pool to pool without a copy in between.

The sender gives its pages to the kernel in place (sendmsg), and the receiver's kernel stores them in place
(recvmsg_into). Both know page ids and page size, so the stream needs no framing.

The fence: every store into the pool is a receive call of this process, made only while the room is open.
Closing a room shuts down the connections of its writers, which ends a receive in progress; the grant is
finished when that call has returned. Nothing is needed from the peer, so the fence passes within milliseconds
even if the peer is stopped or unreachable.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from common.errors import ConfigError, TransferError
from kvtransfer.channel import Channel, GrantedWrite, PeerSender
from kvtransfer.frames import End, Ended, Granted, receive_frame, send_frame
from kvtransfer.granting import GrantingReceiver
from kvtransfer.listener import hang_up
from kvtransfer.pages import stretches
from kvtransfer.region import GroupRegion, HostPages, PoolRegion
from kvtransfer.rooms import Grant, RoomTable
from kvtransfer.transport import Bounds
from wire.messages import TransferEndpoint

BACKEND = "tcp"
_VECTORS = 512  # buffers per call; the kernel takes 1024
_CALL_BYTES = 4 << 20  # a call ends after about this much, so that closing a room is noticed


class TcpReceiver(GrantingReceiver[None]):
    """ReceiverTransport on a fresh port of one interface."""

    def __init__(self, regions: PoolRegion, rooms: RoomTable, bounds: Bounds, interface: str) -> None:
        """Raises ConfigError when the interface cannot be bound."""
        sock = listening_socket(interface)
        host, port = sock.getsockname()
        super().__init__(sock, TransferEndpoint(BACKEND, f"{host}:{port}"), regions, rooms, bounds)

    @contextmanager
    def _admit(self, sock: socket.socket) -> Iterator[None]:  # noqa: ARG002 - no state per peer
        yield None

    def _interrupt(self, sock: socket.socket, region: GroupRegion) -> Callable[[], None]:  # noqa: ARG002
        return lambda: hang_up(sock)

    def _see_through(self, sock: socket.socket, session: None, grant: Grant) -> None:  # noqa: ARG002
        landed = False
        try:
            send_frame(sock, Granted())
            self._receive(sock, grant)
            end = receive_frame(sock)
            landed = isinstance(end, End) and end.landed
        finally:
            self._rooms.finish(grant, landed=landed)
        send_frame(sock, Ended())

    def _receive(self, sock: socket.socket, grant: Grant) -> None:
        region = self._regions[grant.group]
        deadline = time.monotonic() + self._bounds.write_s
        with closing(region.from_host(grant.pages)) as batches:
            for host in batches:
                for buffers in _calls(host, region.page_bytes):
                    self._check(grant, deadline)
                    _receive_all(sock, buffers)
                self._check(grant, deadline)  # before staged pages are copied on into the pool

    def _check(self, grant: Grant, deadline: float) -> None:
        if grant.revoked:
            raise TransferError("the room was closed during a write")
        if time.monotonic() > deadline:
            raise TransferError(f"the write took longer than {self._bounds.write_s:g} s")


class TcpSender(PeerSender):
    """SenderTransport over TCP."""

    _cut_how = socket.SHUT_RDWR  # a thread may be blocked in sending, too, and closing is always certain

    def _connect(self, endpoint: TransferEndpoint) -> socket.socket:
        return connected_socket(endpoint.address, self._bounds)

    def _move(self, granted: GrantedWrite) -> None:
        region = granted.region
        deadline = time.monotonic() + self._bounds.write_s
        with closing(region.to_host(granted.write.src_pages)) as batches:
            for host in batches:
                for buffers in _calls(host, region.page_bytes):
                    _send_all(granted.channel.sock, buffers, deadline)

    def _give_up(self, channel: Channel, certain: bool) -> None:  # noqa: ARG002 - closing is always certain
        channel.close()  # an End would be taken for page bytes


def listening_socket(interface: str) -> socket.socket:
    """A socket bound to a fresh port of `interface`. Raises ConfigError."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.bind((interface, 0))
    except OSError as error:
        sock.close()
        raise ConfigError(
            "interface", f"cannot listen on {interface}: {error}", "give an address of this host"
        ) from None
    _tune(sock)  # inherited by accepted sockets
    return sock


def connected_socket(address: str, bounds: Bounds) -> socket.socket:
    """A socket connected to `host:port`. Raises TransferError."""
    host, _, port = address.rpartition(":")
    try:
        sock = socket.create_connection((host, int(port)), timeout=bounds.connect_s)
    except (OSError, ValueError) as error:
        raise TransferError(f"cannot reach the decode worker at {address}: {error}") from None
    _tune(sock)
    return sock


def _tune(sock: socket.socket) -> None:
    """No delay for control frames; a peer whose host is down is noticed within half a minute."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _calls(host: HostPages, page_bytes: int) -> Iterator[list[memoryview]]:
    """The pages as buffers, neighbours joined, grouped into calls of at most `_CALL_BYTES` (or one page)."""
    memory = host.view()
    limit = max(1, _CALL_BYTES // page_bytes)  # pages
    buffers: list[memoryview] = []
    pages = 0
    for begin, end in stretches(host.pages):
        while begin < end:
            count = min(end - begin, limit - pages)
            buffers.append(memory[begin * page_bytes : (begin + count) * page_bytes])
            begin, pages = begin + count, pages + count
            if pages == limit or len(buffers) == _VECTORS:
                yield buffers
                buffers, pages = [], 0
    if buffers:
        yield buffers


def _receive_all(sock: socket.socket, buffers: list[memoryview]) -> None:
    """Fill every buffer in one call. Raises TransferError when the peer stops sending."""
    wanted = sum(map(len, buffers))
    try:
        got = sock.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]
    except OSError as error:
        raise TransferError(f"the connection broke during a write: {error}") from None
    if got < wanted:
        raise TransferError("the peer stopped sending during a write")


def _send_all(sock: socket.socket, buffers: list[memoryview], deadline: float) -> None:
    """Send every buffer. Raises TransferError after the deadline, or the socket's own time limit."""
    while buffers:
        if time.monotonic() > deadline:
            raise TransferError("the write took too long")
        try:
            sent = sock.sendmsg(buffers)
        except OSError as error:
            raise TransferError(f"the connection broke during a write: {error}") from None
        while buffers and sent >= len(buffers[0]):
            sent -= len(buffers[0])
            buffers = buffers[1:]
        if sent:
            buffers = [buffers[0][sent:], *buffers[1:]]
