"""The sender's half of the control protocol: a Channel per connection, a Peer per receiver, a PeerSender
that every backend's sender is built on."""

from __future__ import annotations

import os
import socket
import threading
from abc import ABC, abstractmethod
from typing import NamedTuple

from common.errors import TransferError
from kvtransfer.frames import (
    Begin,
    Challenge,
    End,
    Ended,
    Granted,
    Hello,
    Pools,
    Refused,
    Silent,
    bound,
    proof_of,
    receive_frame,
    send_frame,
)
from kvtransfer.pages import PageWrite
from kvtransfer.region import GroupRegion, PoolRegion, check_pages
from kvtransfer.transport import Bounds
from wire.messages import TransferEndpoint


class Uncertain(TransferError):
    """The write failed and some of its bytes may still land: the receiver must make sure itself."""


class Refusal(TransferError):
    """This write is not granted (room closed, pages not open, pools that differ); nothing was begun."""


class Channel:
    """One greeted connection to a receiver: one write at a time. Owns the socket and received descriptors."""

    def __init__(self, sock: socket.socket, endpoint: TransferEndpoint, bounds: Bounds) -> None:
        """Greets. Raises TransferError, the socket closed."""
        self.sock = sock
        self.fds: list[int] = []
        self.used = False  # carried a write before: the peer may have dropped it while idle
        try:
            bound(sock, bounds.silence_s)
            challenge = receive_frame(sock)
            if not isinstance(challenge, Challenge):
                raise TransferError("the peer did not greet")
            send_frame(sock, Hello(proof_of(endpoint.params.get("token", ""), challenge.nonce)))
            pools = receive_frame(sock, fds=self.fds if sock.family == socket.AF_UNIX else None)
            if not isinstance(pools, Pools):
                raise TransferError("the peer did not describe its pools")
            self.pools: Pools = pools
        except TransferError:
            self.close()
            raise

    def begin(self, write: PageWrite, page_bytes: int) -> Granted:
        """Obtain the grant. Raises Refusal (the channel stays good) or TransferError."""
        info = self.pools.groups.get(write.group)
        theirs = info.page_bytes if info is not None else 0
        if theirs != page_bytes:
            raise Refusal(f"page_bytes of group {write.group} differ: {page_bytes} here, {theirs} there")
        pages = write.dst_pages.astype("<i8", copy=False).tobytes()
        send_frame(self.sock, Begin(write.room, write.epoch, write.group, pages))
        answer = receive_frame(self.sock)
        if isinstance(answer, Refused):
            raise Refusal(answer.reason)
        if not isinstance(answer, Granted):
            raise TransferError("the peer answered a Begin with something else")
        return answer

    def end(self) -> None:
        """Give the grant back, all bytes landed, and hear that they are counted."""
        send_frame(self.sock, End(landed=True))
        self.expect_ended()

    def expect_ended(self) -> None:
        """The receiver confirms what it was told last. Raises TransferError."""
        if not isinstance(receive_frame(self.sock), Ended):
            raise TransferError("the peer does not confirm the write")

    def close(self) -> None:
        """Close socket and descriptors."""
        self.sock.close()
        while self.fds:
            os.close(self.fds.pop())


class Peer:
    """One receiver as a sender knows it: idle channels, and how many writes are in progress."""

    def __init__(self, endpoint: TransferEndpoint) -> None:
        self.endpoint = endpoint
        self.idle: list[Channel] = []
        self.users = 0
        self.leaving = False


class GrantedWrite(NamedTuple):
    """A write that holds its grant."""

    peer: Peer
    channel: Channel
    grant: Granted
    region: GroupRegion
    write: PageWrite


class PeerSender(ABC):
    """A SenderTransport: asks for the grant, has the backend move the bytes, gives the grant back.

    Threads: any number may write; each has a channel of its own, so nobody waits for somebody else's write.
    """

    def __init__(self, regions: PoolRegion, bounds: Bounds) -> None:
        self._regions = regions
        self._bounds = bounds
        self._peers: dict[str, Peer] = {}
        self._lock = threading.Lock()
        self._closed = False

    @abstractmethod
    def _connect(self, endpoint: TransferEndpoint) -> socket.socket:
        """A connected socket. Raises TransferError."""

    @abstractmethod
    def _move(self, granted: GrantedWrite) -> None:
        """Move the bytes; on return all have been handed over. Raises TransferError; Uncertain when some may
        land later."""

    def _attach(self, peer: Peer, channel: Channel) -> None:  # noqa: B027 - only shm has something to do
        """A new channel: take what came with it."""

    def _detach(self, peer: Peer) -> None:  # noqa: B027 - only shm has something to do
        """No write is in progress and none will be."""

    def write(self, endpoint: TransferEndpoint, write: PageWrite) -> int:
        """See SenderTransport."""
        region = self._regions.get(write.group)
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

    def drain(self, endpoint: TransferEndpoint) -> None:
        """See SenderTransport."""
        with self._lock:
            peer = self._peers.pop(endpoint.address, None)
            if peer is not None:
                self._retire(peer)

    def close(self) -> None:
        """See SenderTransport."""
        with self._lock:
            self._closed = True
            for peer in self._peers.values():
                self._retire(peer)
            self._peers.clear()

    def _enter(self, endpoint: TransferEndpoint) -> Peer:
        with self._lock:
            if self._closed:
                raise TransferError("this sender is closed")
            peer = self._peers.get(endpoint.address)
            if peer is None:
                peer = self._peers[endpoint.address] = Peer(endpoint)
            peer.users += 1
            return peer

    def _leave(self, peer: Peer) -> None:
        with self._lock:
            peer.users -= 1
            if peer.users == 0 and not peer.idle and self._peers.get(peer.endpoint.address) is peer:
                del self._peers[peer.endpoint.address]  # its last channel broke: keep nothing of it
                peer.leaving = True
            if peer.leaving and peer.users == 0:
                self._retire(peer)

    def _retire(self, peer: Peer) -> None:
        """Under the lock. What writes still use goes with the last of them."""
        peer.leaving = True
        while peer.idle:
            peer.idle.pop().close()
        if peer.users == 0:
            self._detach(peer)

    def _begin(self, peer: Peer, region: GroupRegion, write: PageWrite) -> tuple[Channel, Granted]:
        """A channel that holds the grant. A channel that went stale while idle is replaced, once each."""
        while True:
            with self._lock:
                channel = peer.idle.pop() if peer.idle else None
            if channel is None:
                channel = Channel(self._connect(peer.endpoint), peer.endpoint, self._bounds)
                self._attach(peer, channel)
            try:
                return channel, channel.begin(write, region.page_bytes)
            except Refusal:
                self._put_back(peer, channel)
                raise
            except TransferError as error:
                self._give_up(channel, certain=True)  # it may have been granted all the same
                if not channel.used or isinstance(error, Silent):
                    raise

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
        self._put_back(granted.peer, channel)

    def _give_up(self, channel: Channel, certain: bool) -> None:
        """The write failed. Say what is known and hang up; the receiver reads the End before the hang-up."""
        try:
            send_frame(channel.sock, End(landed=False, certain=certain))
        except TransferError:
            pass  # a receiver that cannot hear it finds out by itself, which the fences allow for
        finally:
            channel.close()

    def _put_back(self, peer: Peer, channel: Channel) -> None:
        channel.used = True
        with self._lock:
            if peer.leaving:
                channel.close()
            else:
                peer.idle.append(channel)
