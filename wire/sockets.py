"""The sockets under both kinds of mailbox: one bound to be told things, one connected per peer to tell them.

A frame is `[reply address, payload]`, so a receiver answers by sending to the reply address; nothing depends
on ZeroMQ's routing ids, which change with every reconnect. Both classes belong to one thread at a time.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import NamedTuple

import zmq

from wire.codec import decode, encode
from wire.errors import WireError
from wire.messages import AnyMessage
from wire.security import Curve

log = logging.getLogger(__name__)

# Plain ints: pyzmq's multipart methods and flags go through enums, which costs three times the work itself.
_NOW = int(zmq.NOBLOCK)
_NOW_AND_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_QUEUED_PER_PEER = 100_000
_IDLE_PEER_S = 300.0


class Mail(NamedTuple):
    """A message and the mailbox address of whoever sent it."""

    sender: str
    message: AnyMessage


class Inbound:
    """The bound socket. `address` is where peers reach it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], interface: str, curve: Curve | None) -> None:
        """Binds a fresh port on `interface`."""
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        if curve is not None:
            curve.serve(self.socket)
        self.socket.bind(f"tcp://{interface}:*")
        self.address: str = self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.rejected_frames = 0

    def receive(self, most: int) -> tuple[list[Mail], bool]:
        """What has arrived, without waiting, and whether nothing is left.

        A frame that is not ours is counted and named, and costs nothing else.
        """
        mail: list[Mail] = []
        for _ in range(most):
            try:
                frames = self._frames()
            except zmq.Again:
                return mail, True
            try:
                _, sender, payload = frames
                mail.append(Mail(sender.decode(), decode(payload)))
            except (ValueError, WireError) as error:
                self.rejected_frames += 1
                log.warning("mailbox %s: rejected a frame: %s", self.address, error)
        return mail, False

    def _frames(self) -> list[bytes]:
        """All frames of the next message. Raises zmq.Again when there is none."""
        receive = self.socket.recv
        frames = [receive(_NOW)]  # ROUTER's own, which another one always follows
        more = True
        while more:
            frame = receive(
                _NOW, copy=False
            )  # it knows whether more follow; asking the socket costs twice that
            frames.append(frame.bytes)
            more = frame.more
        return frames


@dataclass(slots=True)
class _Peer:
    socket: zmq.Socket[bytes]
    used_at: float


class Peers:
    """Connections to the mailboxes that were told something, closed when nothing was said for a while."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], reply_address: str, curve: Curve | None
    ) -> None:
        self._context = context
        self._reply = reply_address.encode()
        self._curve = curve
        self._peers: dict[str, _Peer] = {}
        self.dropped = 0

    def send(self, to: str, message: AnyMessage) -> None:
        """Hand a message to ZeroMQ. Never blocks: one that cannot be queued is counted in `dropped`."""
        peer = self._peers.get(to) or self._connect(to)
        peer.used_at = time.monotonic()
        try:
            peer.socket.send(self._reply, _NOW_AND_MORE)  # all of a message is queued, or nothing
            peer.socket.send(encode(message), _NOW)
        except zmq.Again:
            self.dropped += 1

    def forget(self, address: str) -> None:
        """Drop the connection to a peer that is gone, with whatever is queued for it."""
        peer = self._peers.pop(address, None)
        if peer is not None:
            peer.socket.close(linger=0)

    def _connect(self, address: str) -> _Peer:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, _QUEUED_PER_PEER)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if self._curve is not None:
            self._curve.connect(socket)
        socket.connect(address)
        now = time.monotonic()
        peer = self._peers[address] = _Peer(socket, now)
        for idle in [name for name, known in self._peers.items() if now - known.used_at > _IDLE_PEER_S]:
            self.forget(idle)
        return peer
