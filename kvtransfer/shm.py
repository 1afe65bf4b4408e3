"""shm: the decode worker's pool is a memfd that prefill workers on the same host map and write into.

The receiver listens on an abstract Unix socket with a random name. It passes the descriptors to a peer that
proves that it knows the endpoint's token and runs under the same user. A sender maps each pool once per
receiver.

The fence: a grant ends with the sender's `End`, which it sends after its last store; without an `End`, when
the kernel reports through a pidfd that the process has exited with all of its threads. A peer that is
stopped, or whose connection broke, keeps its grant: the pages stay in quarantine until the peer is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import secrets
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager

from common.errors import ConfigError, TransferError
from kvcache.buffers import check_sealed
from kvtransfer.channel import Channel, GrantedWrite, Peer, PeerSender
from kvtransfer.frames import End, Ended, Gone, Granted, Pools, bound
from kvtransfer.granting import GrantingReceiver
from kvtransfer.pages import copy_pages
from kvtransfer.region import PoolRegion
from kvtransfer.rooms import Grant, RoomTable
from kvtransfer.streams import Stream
from kvtransfer.transport import Bounds
from wire.messages import TransferEndpoint

log = logging.getLogger(__name__)

BACKEND = "shm"
_CREDENTIALS = struct.Struct("@iII")  # pid, uid, gid


def possible(regions: PoolRegion) -> bool:
    """Whether every pool is in shared memory."""
    return all(region.fd is not None for region in regions.values())


class ShmReceiver(GrantingReceiver[int]):
    """ReceiverTransport over pools that live in memfds."""

    def __init__(self, regions: PoolRegion, rooms: RoomTable, bounds: Bounds) -> None:
        """Raises ConfigError when a pool is not in shared memory."""
        for group, region in regions.items():
            if region.fd is None:
                raise ConfigError(
                    "kv_transfer_backend",
                    f"shm needs a shared pool and group {group} is not in one",
                    "allocate the pool in shared memory, or use tcp",
                )
        name = f"baton-kv-{secrets.token_hex(8)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(f"\0{name}")
        super().__init__(sock, TransferEndpoint(BACKEND, f"@{name}"), regions, rooms, bounds)

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


class _Mapping:
    """One receiver's pool in this process's memory."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Raises OSError or ValueError, and then nothing is mapped."""
        check_sealed(fd, nbytes)
        self.nbytes = nbytes
        self._mmap = mmap.mmap(fd, nbytes)
        self._mmap.madvise(mmap.MADV_DONTFORK)  # a forked child could write after this process has exited
        self._mmap.madvise(mmap.MADV_HUGEPAGE)
        self._export: ctypes.c_char | None = ctypes.c_char.from_buffer(self._mmap)
        self.ptr = ctypes.addressof(self._export)

    def close(self) -> None:
        self._export = None  # an mmap with an exported buffer cannot be closed
        self._mmap.close()


class ShmSender(PeerSender):
    """SenderTransport that stores straight into the receiver's pool."""

    def __init__(self, regions: PoolRegion, bounds: Bounds) -> None:
        """Nothing is mapped before the first write to a receiver."""
        super().__init__(regions, bounds)
        self._mappings: dict[Peer, dict[str, _Mapping]] = {}

    def _connect(self, endpoint: TransferEndpoint) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bound(sock, self._bounds.connect_s)  # `settimeout` would fail at once while many strangers knock
        try:
            sock.connect("\0" + endpoint.address.removeprefix("@"))
        except OSError as error:
            sock.close()
            raise TransferError(f"cannot reach the decode worker's shared memory: {error}") from None
        return sock

    def _attach(self, peer: Peer, channel: Channel) -> None:
        with self._lock:
            try:
                if peer not in self._mappings:
                    infos = channel.pools.groups.items()
                    self._mappings[peer] = {
                        name: _Mapping(fd, info.page_bytes * info.num_pages)
                        for (name, info), fd in zip(infos, channel.fds, strict=True)
                    }
            except (OSError, ValueError) as error:
                channel.close()
                raise TransferError(f"cannot map the decode worker's pool: {error}") from None
        while channel.fds:
            os.close(channel.fds.pop())

    def _detach(self, peer: Peer) -> None:
        for mapping in self._mappings.pop(peer, {}).values():
            mapping.close()

    def _move(self, granted: GrantedWrite) -> None:
        region, write = granted.region, granted.write
        mapping = self._mappings[granted.peer].get(write.group)
        last = 0 if mapping is None else mapping.nbytes // region.page_bytes - 1
        if mapping is None or int(write.dst_pages.min()) < 0 or int(write.dst_pages.max()) > last:
            raise TransferError(f"the peer granted pages of group {write.group} that it does not have")
        done = 0
        with closing(region.to_host(write.src_pages)) as batches:
            for host in batches:
                dst_pages = write.dst_pages[done : done + len(host.pages)]
                copy_pages(host.ptr, host.pages, mapping.ptr, dst_pages, region.page_bytes)
                done += len(host.pages)
