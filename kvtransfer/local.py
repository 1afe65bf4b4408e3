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
import itertools
import os
import secrets
import select
import socket
import struct
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from common.errors import TransferError
from kvcache.device_memory import DeviceError
from kvtransfer.channel import Channel, GrantedWrite, Peer, PeerSender
from kvtransfer.frames import Begin, End, Ended, Gone, Granted, PoolInfo, Pools, bound
from kvtransfer.granting import GrantingReceiver
from kvtransfer.region import NO_REGIONS, GroupRegion, PoolRegion
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


class MappedPool(NamedTuple):
    """A receiver's pool, as it described it when it was mapped, and what is mapped of it."""

    info: PoolInfo
    memories: tuple[Mapped, ...]


class LocalReceiver(GrantingReceiver[int]):
    """ReceiverTransport over pools that each have a descriptor, of every part."""

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
        parts = [part for region in self._regions.values() for part in region.parts]
        stream.send(Pools(self._infos()), fds=[part.fd for part in parts if part.fd is not None])

    def _see_through(self, stream: Stream, pidfd: int, begin: Begin, grant: Grant) -> None:  # noqa: ARG002
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
        self._mappings: dict[Peer, dict[str, MappedPool]] = {}

    @abstractmethod
    def _map(self, region: GroupRegion, info: PoolInfo, fds: Sequence[int]) -> Iterator[Mapped]:
        """Map what this sender writes to of a pool with such pages as `region`; `fds` are of its parts.
        Raises OSError, ValueError, DeviceError or TransferError, and then nothing is mapped but what it has
        given."""

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
            except (OSError, ValueError, DeviceError, TransferError) as error:
                channel.close()
                raise Unmappable(f"cannot map the decode worker's pool: {error}") from None
        while channel.fds:
            os.close(channel.fds.pop())

    def _map_all(self, channel: Channel) -> dict[str, MappedPool]:
        mapped: dict[str, MappedPool] = {}
        fds = iter(channel.fds)
        with contextlib.ExitStack() as on_error:
            for name, info in channel.pools.groups.items():
                own = list(itertools.islice(fds, info.ranges * info.copies))
                region = self._regions.get(name)
                if len(own) != info.ranges * info.copies or not own:
                    raise ValueError(f"it has not sent a descriptor for each part of group {name}")
                if region is None or region.page_bytes != info.page_bytes:
                    continue  # a write to it is refused
                memories: list[Mapped] = []
                for memory in self._map(region, info, own):
                    on_error.callback(memory.close)
                    memories.append(memory)
                mapped[name] = MappedPool(info, tuple(memories))
            if next(fds, None) is not None:
                raise ValueError("it has sent more descriptors than it has parts of pools")
            on_error.pop_all()
        return mapped

    def _detach(self, peer: Peer) -> None:
        for pool in self._mappings.pop(peer, {}).values():
            for memory in pool.memories:
                memory.close()

    def _target(self, granted: GrantedWrite) -> MappedPool:
        """The pool that the pages go to. Raises TransferError when they do not lie in it."""
        write = granted.write
        pool = self._mappings[granted.peer].get(write.group)
        last = -1 if pool is None else pool.info.num_pages - 1
        if pool is None or int(write.dst_pages.min()) < 0 or int(write.dst_pages.max()) > last:
            raise TransferError(f"the peer granted pages of group {write.group} that it does not have")
        return pool
