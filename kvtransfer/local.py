"""Two workers of one host: decode sends the descriptors of its pools, and prefill workers map them.

The receiver listens on an abstract Unix socket with a random name. It passes the descriptors to a peer that
proves that it knows the endpoint's token and runs under the same user. A sender maps each pool once per
receiver.

The fence: a grant ends with the sender's `End`, which it sends when all of its copies are done; without an
`End`, or with one that leaves open what may still land, when the kernel reports through a pidfd that the
process has exited with all of its threads. A peer that is stopped, or whose connection broke, keeps its
grant: the pages stay in quarantine until the peer is killed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from common.errors import TransferError
from kvcache.device_memory import DeviceError
from kvtransfer.channel import Channel, GrantedWrite, Peer, PeerSender
from kvtransfer.frames import End, Ended, Gone, Granted, Pools, bound
from kvtransfer.granting import GrantingReceiver
from kvtransfer.region import NO_REGIONS, PoolRegion
from kvtransfer.rooms import Grant, RoomTable
from kvtransfer.streams import Stream
from kvtransfer.transport import Bounds
from wire.messages.transfer import TransferEndpoint

_CREDENTIALS = struct.Struct("@iII")  # pid, uid, gid


class Unmappable(TransferError):
    """The receiver's pool cannot be mapped here."""


class Mapped(Protocol):
    """A pool of another process: `nbytes` from the address `ptr` on."""

    ptr: int
    nbytes: int

    def close(self) -> None:
        """Unmap it. No copy to it is under way."""
        ...


class LocalReceiver(GrantingReceiver[int]):
    """ReceiverTransport over pools that each have a descriptor."""

    def __init__(
        self, backend: str, params: Mapping[str, str], regions: PoolRegion, rooms: RoomTable, bounds: Bounds
    ) -> None:
        """`params` are what senders must know beside the address."""
        name = f"baton-kv-{secrets.token_hex(8)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(f"\0{name}")
        super().__init__(sock, TransferEndpoint(backend, f"@{name}", dict(params)), regions, rooms, bounds)

    @contextmanager
    def _admit(self, stream: Stream) -> Iterator[int]:
        """The peer's pidfd."""
        credentials = stream.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(credentials)
        if uid != os.getuid():
            raise TransferError(f"process {pid} runs under user {uid}")
        try:
            # Before the descriptors are sent: a peer that takes them is alive after this line, so its pid,
            # taken when it connected, has not been given to another process in between.
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            raise TransferError(f"process {pid} is gone") from None
        try:
            yield pidfd
        finally:
            os.close(pidfd)

    def _send_pools(self, stream: Stream, pidfd: int) -> None:  # noqa: ARG002
        fds = [region.fd for region in self._regions.values() if region.fd is not None]
        stream.send(Pools(self._infos()), fds=fds)

    def _see_through(self, stream: Stream, pidfd: int, grant: Grant) -> None:
        with contextlib.suppress(TransferError):  # a peer that has given up has sent its End before
            stream.send(Granted())
        try:
            end = self._await_end(stream, pidfd)
            if not end.certain:
                raise TransferError("the peer does not know what of its write may still land")
        except TransferError:
            self._await_exit(grant, pidfd)
            raise
        self._rooms.finish(grant, landed=end.landed)
        stream.send(Ended())

    def _await_end(self, stream: Stream, pidfd: int) -> End:
        """Wait for the sender's End. Raises TransferError when it cannot come any more."""
        poller = select.poll()
        poller.register(stream.sock, select.POLLIN)
        poller.register(pidfd, select.POLLIN)
        while not self._listener.closing.is_set():
            ready = [fd for fd, _ in poller.poll(1000)]
            if stream.sock.fileno() in ready:  # first: an End sent just before exit counts
                frame = stream.receive()
                if not isinstance(frame, End):
                    raise TransferError("expected an End")
                return frame
            if pidfd in ready:
                raise Gone("the peer exited during a write")
        raise TransferError("the receiver is closing")

    def _await_exit(self, grant: Grant, pidfd: int) -> None:
        """Finish the grant when the writer has exited. If this receiver closes first, do not finish it."""
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        while not self._listener.closing.is_set():
            if poller.poll(200):
                self._rooms.finish(grant, landed=False)
                return


class LocalSender(PeerSender):
    """SenderTransport that copies into the receiver's pools, which it maps."""

    def __init__(self, regions: PoolRegion, bounds: Bounds, arenas: PoolRegion = NO_REGIONS) -> None:
        """Nothing is mapped before the first write to a receiver."""
        super().__init__(regions, bounds, arenas)
        self._mappings: dict[Peer, dict[str, Mapped]] = {}

    @abstractmethod
    def _map(self, fd: int, nbytes: int) -> Mapped:
        """Map a pool. Raises OSError, ValueError or DeviceError, and then nothing is mapped."""

    def _connect(self, endpoint: TransferEndpoint) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bound(sock, self._bounds.connect_s)  # `settimeout` would fail at once while many strangers knock
        try:
            sock.connect("\0" + endpoint.address.removeprefix("@"))
        except OSError as error:
            sock.close()
            raise TransferError(f"cannot reach the decode worker on this host: {error}") from None
        return sock

    def _attach(self, peer: Peer, channel: Channel) -> None:
        with self._lock:
            try:
                if peer not in self._mappings:
                    self._mappings[peer] = self._map_all(channel)
            except (OSError, ValueError, DeviceError) as error:
                channel.close()
                raise Unmappable(f"cannot map the decode worker's pool: {error}") from None
        while channel.fds:
            os.close(channel.fds.pop())

    def _map_all(self, channel: Channel) -> dict[str, Mapped]:
        mapped: dict[str, Mapped] = {}
        with contextlib.ExitStack() as on_error:
            for (name, info), fd in zip(channel.pools.groups.items(), channel.fds, strict=True):
                mapped[name] = self._map(fd, info.page_bytes * info.num_pages)
                on_error.callback(mapped[name].close)
            on_error.pop_all()
        return mapped

    def _detach(self, peer: Peer) -> None:
        for mapping in self._mappings.pop(peer, {}).values():
            mapping.close()

    def _target(self, granted: GrantedWrite) -> Mapped:
        """The pool that the pages go to. Raises TransferError when they do not lie in it."""
        region, write = granted.region, granted.write
        mapping = self._mappings[granted.peer].get(write.group)
        last = 0 if mapping is None else mapping.nbytes // region.page_bytes - 1
        if mapping is None or int(write.dst_pages.min()) < 0 or int(write.dst_pages.max()) > last:
            raise TransferError(f"the peer granted pages of group {write.group} that it does not have")
        return mapping
