"""tcp: page bytes over one Stream per writer, encrypted where the cluster has a secret.

The fence: every store into the pool is a call of this process, which receives or decrypts, made only while
the room is open. Closing a room shuts down the connections of its writers, which ends a receive in progress;
the grant is finished when that call has returned, and with a pool on a device when the copies into it are
done. Nothing is needed from the peer, so the fence passes within milliseconds even if the peer is stopped or
unreachable.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from common.errors import ConfigError, TransferError
from common.ports import ANY_PORT, Ports, bind_free
from kvtransfer.channel import Channel, GrantedWrite, PeerSender
from kvtransfer.encryption import CIPHER
from kvtransfer.frames import Begin, End, Ended, Granted
from kvtransfer.granting import GrantingReceiver
from kvtransfer.listener import hang_up
from kvtransfer.region import PoolRegion
from kvtransfer.rooms import Grant, RoomTable
from kvtransfer.streams import Stream
from kvtransfer.transport import Bounds
from wire.messages.transfer import TransferEndpoint

BACKEND = "tcp"


class TcpReceiver(GrantingReceiver[None]):
    """ReceiverTransport on a port of one interface."""

    def __init__(
        self,
        regions: PoolRegion,
        rooms: RoomTable,
        bounds: Bounds,
        interface: str,
        encrypted: bool = False,
        ports: Ports = ANY_PORT,
    ) -> None:
        """Raises ConfigError when no port can be had."""
        sock = listening_socket(interface, ports)
        endpoint = listening_endpoint(BACKEND, sock, encrypted)
        super().__init__(sock, endpoint, regions, rooms, bounds)

    @contextmanager
    def _admit(self, stream: Stream) -> Iterator[None]:  # noqa: ARG002 - no state per peer
        yield None

    def _interrupt(self, stream: Stream, begin: Begin) -> Callable[[], None]:  # noqa: ARG002
        return lambda: hang_up(stream.sock)

    def _see_through(self, stream: Stream, session: None, begin: Begin, grant: Grant) -> None:  # noqa: ARG002
        with self._storing(grant):
            stream.send(Granted())
            self._receive(stream, grant)
            end = stream.receive()
        self._rooms.finish(grant, landed=isinstance(end, End) and end.landed)
        stream.send(Ended())

    def _receive(self, stream: Stream, grant: Grant) -> None:
        region = self._regions[grant.group]
        deadline = time.monotonic() + self._bounds.write_s
        with closing(region.from_host(grant.pages)) as batches:
            for host in batches:
                stream.receive_pages(host, region.page_bytes, lambda: self._check(grant, deadline))
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
                granted.channel.stream.send_pages(host, region.page_bytes, deadline)

    def _give_up(self, channel: Channel, certain: bool) -> None:  # noqa: ARG002 - closing is always certain
        channel.close()  # an End would be taken for page bytes


def listening_socket(interface: str, ports: Ports) -> socket.socket:
    """A socket bound to one of `ports` of `interface`. Raises ConfigError."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        bind_free(ports, interface, lambda port: sock.bind((interface, port)))
    except ConfigError:
        sock.close()
        raise
    _tune(sock)  # inherited by accepted sockets
    return sock


def listening_endpoint(backend: str, sock: socket.socket, encrypted: bool) -> TransferEndpoint:
    """How to reach a listening socket; an encrypted one tells its cipher."""
    host, port = sock.getsockname()
    return TransferEndpoint(backend, f"{host}:{port}", {"cipher": CIPHER} if encrypted else {})


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
