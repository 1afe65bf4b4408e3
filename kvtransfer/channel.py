"""The sender's side of the control protocol: a Channel per connection, a Peer per receiver, and PeerSender,
the base of every backend's sender."""

from __future__ import annotations

import os
import socket
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import NamedTuple

from common.errors import TransferError
from kvcache.page_parts import ONE_PART, PageParts
from kvtransfer.frames import (
    Begin,
    End,
    Ended,
    Gone,
    Granted,
    Pools,
    Refused,
    Silent,
    bound,
)
from kvtransfer.greeting import introduce
from kvtransfer.pages import PageWrite
from kvtransfer.region import NO_REGIONS, GroupRegion, PoolRegion, check_pages
from kvtransfer.transport import Bounds
from wire.messages.transfer import TransferEndpoint

_MAX_GREETINGS = 4


class Uncertain(TransferError):
    """The write failed, and some of its bytes may still land: only the receiver can put an end to that."""


class Refusal(TransferError):
    """The write is not granted: room closed, pages not open, or different pools. Nothing was written."""


class Line:
    """A connected socket whose owner may be blocked on it while another thread cuts it. Owns the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.closed = False
        self._lock = threading.Lock()

    def cut(self, how: int) -> None:
        """Shut the socket down (`socket.SHUT_RD` or `SHUT_RDWR`), which wakes its owner."""
        with self._lock:
            if not self.closed:
                with suppress(OSError):  # the peer hung up first
                    self.sock.shutdown(how)

    def close(self) -> None:
        """Close the socket."""
        with self._lock:
            self.closed = True
            self.sock.close()


class Channel:
    """One authenticated connection to a receiver, for one write at a time. Owns line and descriptors."""

    def __init__(self, line: Line, endpoint: TransferEndpoint, bounds: Bounds) -> None:
        """Authenticate. Raises TransferError, after closing the line."""
        self._line = line
        self.fds: list[int] = []
        self.used = False  # for a write before: the peer may have closed it while it was idle
        try:
            bound(line.sock, bounds.silence_s)
            self.stream = introduce(line.sock, endpoint)
            pools = self.stream.receive(fds=self.fds if line.sock.family == socket.AF_UNIX else None)
            if not isinstance(pools, Pools):
                raise TransferError("the peer did not describe its pools")
            self.pools: Pools = pools
        except TransferError:
            self.close()
            raise

    def begin(self, write: PageWrite, page_bytes: int, parts: PageParts = ONE_PART) -> Granted:
        """Get a grant for a write of pages that lie in `parts`. Raises Refusal, after which the channel can
        be used again, or TransferError."""
        info = self.pools.groups.get(write.group)
        theirs = info.page_bytes if info is not None else 0
        if info is None or theirs != page_bytes:
            raise Refusal(f"page_bytes of group {write.group} differ: {page_bytes} here, {theirs} there")
        direct = info.takes_directly(parts)
        pages = write.dst_pages.astype("<i8", copy=False).tobytes()
        self.stream.send(Begin(write.room, write.epoch, write.group, pages, direct))
        answer = self.stream.receive()
        if isinstance(answer, Refused):
            raise Refusal(answer.reason)
        if not isinstance(answer, Granted):
            raise TransferError("the peer answered a Begin with something else")
        return answer

    def end(self) -> None:
        """All bytes have landed: give the grant back and wait until the receiver has counted them."""
        self.stream.send(End(landed=True))
        self.expect_ended()

    def expect_ended(self) -> None:
        """Wait until the receiver confirms the last frame. Raises TransferError."""
        if not isinstance(self.stream.receive(), Ended):
            raise TransferError("the peer does not confirm the write")

    def close(self) -> None:
        """Close line and descriptors."""
        self._line.close()
        while self.fds:
            os.close(self.fds.pop())


class Peer:
    """A sender's state for one receiver: idle channels, all lines, and the number of writes in progress."""

    def __init__(self, endpoint: TransferEndpoint) -> None:
        self.endpoint = endpoint
        self.idle: list[Channel] = []
        self.lines: list[Line] = []  # of all channels; closed ones leave with the next write that ends
        self.users = 0
        self.leaving = False

    def put_back(self, channel: Channel) -> None:
        """It can be used for another write. The caller holds the sender's lock."""
        channel.used = True
        if self.leaving:
            channel.close()
        else:
            self.idle.append(channel)


class GrantedWrite(NamedTuple):
    """A write that has its grant."""

    peer: Peer
    channel: Channel
    grant: Granted
    region: GroupRegion
    write: PageWrite


class PeerSender(ABC):
    """A SenderTransport: gets the grant, lets the backend move the bytes, gives the grant back.

    Any number of threads may write. Each write has a channel of its own, so none waits for another.
    """

    _cut_how = socket.SHUT_RD
    """What is shut down of a line whose peer is down. The thread that waits there can still send an End, and
    the peer finds it when it goes on: so the grant ends though the peer was stopped."""

    def __init__(self, regions: PoolRegion, bounds: Bounds, arenas: PoolRegion = NO_REGIONS) -> None:
        """Pages come from `regions`, the device's pools, and from `arenas`, the host tier's."""
        self._regions = regions
        self.arenas = arenas
        self._bounds = bounds
        self._peers: dict[tuple[str, str], Peer] = {}  # by the identity of the endpoint
        self._down: set[tuple[str, str]] = set()  # identities
        self._lock = threading.Lock()
        self._closed = False

    @abstractmethod
    def _connect(self, endpoint: TransferEndpoint) -> socket.socket:
        """A connected socket. Raises TransferError."""

    @abstractmethod
    def _move(self, granted: GrantedWrite) -> None:
        """Move the bytes and return when all have been handed over. Raises TransferError; Uncertain if some
        may land later."""

    def obstacle(self, endpoint: TransferEndpoint) -> str:  # noqa: ARG002 - for overriders
        """Why nothing can be written to this endpoint of the same backend; "" when nothing is known. Does not
        wait."""
        return ""

    def _attach(self, peer: Peer, channel: Channel) -> None:  # noqa: B027 - for backends that map pools
        """A channel has been opened: take over the descriptors that came with it."""

    def _detach(self, peer: Peer) -> None:  # noqa: B027 - for backends that map pools
        """No write to the peer is in progress, and none will be."""

    def write(self, endpoint: TransferEndpoint, write: PageWrite) -> int:
        region = (self.arenas if write.on_host else self._regions).get(write.group)
        if region is None or not check_pages(region, write.src_pages):
            raise TransferError(f"this worker has no such pages of group {write.group}")
        if len(write) == 0:
            return 0
        peer = self._enter(endpoint)
        try:
            granted = GrantedWrite(peer, *self._begin(peer, region, write), region, write)
            self._carry_out(granted)
        finally:
            self._leave(peer)
        return len(write) * region.page_bytes

    def suspend(self, endpoint: TransferEndpoint) -> None:
        with self._lock:
            self._down.add(endpoint.identity)
            peer = self._peers.get(endpoint.identity)
            if peer is not None:
                for line in peer.lines:
                    line.cut(self._cut_how)

    def resume(self, endpoint: TransferEndpoint) -> None:
        with self._lock:
            self._down.discard(endpoint.identity)

    def drain(self, endpoint: TransferEndpoint) -> None:
        with self._lock:
            self._down.discard(endpoint.identity)
            peer = self._peers.pop(endpoint.identity, None)
            if peer is not None:
                self._retire(peer)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for peer in self._peers.values():
                self._retire(peer)
            self._peers.clear()

    def _enter(self, endpoint: TransferEndpoint) -> Peer:
        with self._lock:
            self._check_open(endpoint)
            peer = self._peers.get(endpoint.identity)
            if peer is None:
                peer = self._peers[endpoint.identity] = Peer(endpoint)
            peer.users += 1
            return peer

    def _leave(self, peer: Peer) -> None:
        with self._lock:
            peer.users -= 1
            peer.lines = [line for line in peer.lines if not line.closed]
            if peer.users == 0 and not peer.idle and self._peers.get(peer.endpoint.identity) is peer:
                del self._peers[peer.endpoint.identity]  # its last channel broke
                peer.leaving = True
            if peer.leaving and peer.users == 0:
                self._retire(peer)

    def _retire(self, peer: Peer) -> None:
        """Close idle channels; the last write in progress does the rest. The caller holds the lock."""
        peer.leaving = True
        while peer.idle:
            peer.idle.pop().close()
        if peer.users == 0:
            self._detach(peer)

    def _begin(self, peer: Peer, region: GroupRegion, write: PageWrite) -> tuple[Channel, Granted]:
        """A channel with the grant. One that the peer closed while it was idle is replaced by another."""
        while True:
            with self._lock:
                channel = peer.idle.pop() if peer.idle else None
            if channel is None:
                channel = self._open_channel(peer)
                self._attach(peer, channel)
            try:
                return channel, channel.begin(write, region.page_bytes, region.page_parts)
            except Refusal:
                with self._lock:
                    peer.put_back(channel)
                raise
            except TransferError as error:
                self._give_up(channel, certain=True)  # the receiver may have granted it all the same
                if not channel.used or isinstance(error, Silent):
                    raise

    def _open_channel(self, peer: Peer) -> Channel:
        """A new channel. One that is dropped while it is greeted is tried again: a receiver that many
        strangers knock at drops the oldest."""
        for _ in range(_MAX_GREETINGS - 1):
            with suppress(Gone):
                return Channel(self._new_line(peer), peer.endpoint, self._bounds)
        return Channel(self._new_line(peer), peer.endpoint, self._bounds)

    def _new_line(self, peer: Peer) -> Line:
        line = Line(self._connect(peer.endpoint))
        try:
            with self._lock:
                self._check_open(peer.endpoint)  # it may have gone down meanwhile
                peer.lines.append(line)
        except TransferError:
            line.close()
            raise
        return line

    def _check_open(self, endpoint: TransferEndpoint) -> None:
        """Raises TransferError when no write to this peer may begin. The caller holds the lock."""
        if self._closed:
            raise TransferError("this sender is closed")
        if endpoint.identity in self._down:
            raise TransferError("the decode worker is down")

    def _carry_out(self, granted: GrantedWrite) -> None:
        channel = granted.channel
        try:
            self._move(granted)
        except BaseException as error:
            self._give_up(channel, certain=not isinstance(error, Uncertain))
            raise
        try:
            channel.end()
        except TransferError:
            channel.close()
            raise
        with self._lock:
            granted.peer.put_back(channel)

    def _give_up(self, channel: Channel, certain: bool) -> None:
        """The write failed: send what is known about it and close. The receiver reads that End first."""
        try:
            channel.stream.send(End(landed=False, certain=certain))
        except TransferError:
            pass  # a receiver that does not get it finds out by itself: the fences allow for that
        finally:
            channel.close()
