"""The sockets under both kinds of mailbox: one bound to be told things, one connected per peer to tell them.

A message is one frame: a byte with the length of the sender's mailbox address, that address, the payload. A
receiver answers by sending to that address; nothing depends on ZeroMQ's routing ids, which change with every
reconnect, so the sockets are PULL and PUSH, which have none. (The obvious form, a frame for each part, costs
reader and writer twice as much per message.) Both classes belong to one thread at a time.
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

_NOW = int(zmq.NOBLOCK)  # a plain int: pyzmq's flags are enums, which cost more than the work itself
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
        self.socket = context.socket(zmq.PULL)
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
        receive = self.socket.recv
        for _ in range(most):
            try:
                frame = receive(_NOW)
            except zmq.Again:
                return mail, True
            try:
                mail.append(_open(frame))
            except (ValueError, WireError) as error:
                self.rejected_frames += 1
                log.warning("mailbox %s: rejected a frame: %s", self.address, error)
        return mail, False


def _open(frame: bytes) -> Mail:
    """A frame's sender and message. Raises ValueError or WireError for one that is not ours."""
    begin = frame[0] + 1 if frame else 1
    if len(frame) <= begin:
        raise WireError(f"a frame of {len(frame)} bytes holds no message")
    return Mail(frame[1:begin].decode(), decode(frame[begin:]))


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
        reply = reply_address.encode()
        self._head = bytes((len(reply),)) + reply
        self._curve = curve
        self._peers: dict[str, _Peer] = {}
        self.dropped = 0

    def send(self, to: str, message: AnyMessage) -> None:
        """Hand a message to ZeroMQ. Never blocks: one that cannot be queued is counted in `dropped`."""
        peer = self._peers.get(to) or self._connect(to)
        peer.used_at = time.monotonic()
        try:
            peer.socket.send(self._head + encode(message), _NOW)
        except zmq.Again:
            self.dropped += 1

    def forget(self, address: str) -> None:
        """Drop the connection to a peer that is gone, with whatever is queued for it."""
        peer = self._peers.pop(address, None)
        if peer is not None:
            peer.socket.close(linger=0)

    def _connect(self, address: str) -> _Peer:
        socket = self._context.socket(zmq.PUSH)
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
