"""Mailbox: one bound ZeroMQ socket to be told things, one connected socket per peer to tell them.

Every process has exactly one. A frame is `[reply address, payload]`, so a receiver answers by sending to
the reply address; nothing depends on ZeroMQ's routing ids, which change with every reconnect.

Threads: a mailbox owns one I/O thread, the only one that touches sockets. `send` may be called from any
thread; `take` and `wait` belong to one consumer. Sending never blocks and never raises: a message that
cannot be queued is counted in `dropped`, and repeated by whoever needs the answer (wire/repeater.py) or
asked for again (Resend), because ZeroMQ promises neither delivery nor order across reconnects.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import zmq

from wire.codec import decode, encode
from wire.errors import WireError
from wire.messages import AnyMessage
from wire.security import Curve

log = logging.getLogger(__name__)

_QUEUED_PER_PEER = 100_000
_IDLE_PEER_S = 300.0


class Mail(NamedTuple):
    """A message and the mailbox address of whoever sent it."""

    sender: str
    message: AnyMessage


@dataclass(slots=True)
class _Peer:
    socket: zmq.Socket[bytes]
    used_at: float


class Mailbox:
    """A process's address for typed messages. Close it, or use it as a context manager."""

    def __init__(
        self,
        interface: str = "127.0.0.1",
        curve: Curve | None = None,
        on_mail: Callable[[], None] | None = None,
    ) -> None:
        """Bind a fresh port on `interface`. `on_mail` runs on the I/O thread after mail has been queued."""
        self._context = zmq.Context()
        self._curve = curve
        self._inbound = self._context.socket(zmq.ROUTER)
        self._inbound.setsockopt(zmq.RCVHWM, 0)
        self._inbound.setsockopt(zmq.LINGER, 0)
        if curve is not None:
            curve.serve(self._inbound)
        self._inbound.bind(f"tcp://{interface}:*")
        self.address: str = self._inbound.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._reply = self.address.encode()
        self._peers: dict[str, _Peer] = {}
        self._outbox: deque[tuple[str, AnyMessage | None]] = deque()
        self._inbox: queue.SimpleQueue[Mail | None] = queue.SimpleQueue()
        self._on_mail = on_mail
        self.dropped = 0
        self.rejected_frames = 0
        wake_address = f"inproc://wake-{id(self)}"
        self._wake_out = self._context.socket(zmq.PAIR)
        self._wake_in = self._context.socket(zmq.PAIR)
        self._wake_in.bind(wake_address)
        self._wake_out.connect(wake_address)
        self._wake_lock = threading.Lock()
        self._wake_pending = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="mailbox", daemon=True)
        self._thread.start()

    def send(self, to: str, message: AnyMessage) -> None:
        """Queue a message for the mailbox at `to`. Never blocks; delivery is not promised."""
        self._outbox.append((to, message))
        self._wake()

    def forget(self, peer: str) -> None:
        """Drop the connection to a peer that is gone, with whatever is queued for it."""
        self._outbox.append((peer, None))
        self._wake()

    def take(self) -> list[Mail]:
        """All mail that is there, without waiting."""
        mail: list[Mail] = []
        while True:
            try:
                piece = self._inbox.get_nowait()
            except queue.Empty:
                return mail
            if piece is not None:
                mail.append(piece)

    def wait(self, timeout_s: float) -> list[Mail]:
        """All mail that is there; if there is none, what arrives first within `timeout_s`, or nothing.

        Returns early, perhaps empty-handed, after a `nudge`.
        """
        try:
            first = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return []
        return [first, *self.take()] if first is not None else self.take()

    def nudge(self) -> None:
        """Make a `wait` in progress (or the next one) return: something other than mail has happened."""
        self._inbox.put(None)

    def close(self) -> None:
        """Stop the I/O thread and free the port. What is queued gets half a second to leave."""
        if self._closing:
            return
        self._closing = True
        self._wake()
        self._thread.join(timeout=5.0)
        self._context.destroy(linger=500)

    def __enter__(self) -> Mailbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wake(self) -> None:
        with self._wake_lock:
            if self._wake_pending:
                return
            self._wake_pending = True
            self._wake_out.send(b"")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._inbound, zmq.POLLIN)
        poller.register(self._wake_in, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll(1000))
            if self._wake_in in ready:
                self._wake_in.recv()
                with self._wake_lock:
                    self._wake_pending = False
            self._flush()
            if self._inbound in ready and self._receive() and self._on_mail is not None:
                self._on_mail()
        self._flush()

    def _flush(self) -> None:
        now = time.monotonic()
        while self._outbox:
            address, message = self._outbox.popleft()
            if message is None:
                peer = self._peers.pop(address, None)
                if peer is not None:
                    peer.socket.close(linger=0)
                continue
            peer = self._peer(address, now)
            try:
                peer.socket.send_multipart([self._reply, encode(message)], zmq.NOBLOCK)
            except zmq.Again:
                self.dropped += 1

    def _peer(self, address: str, now: float) -> _Peer:
        peer = self._peers.get(address)
        if peer is None:
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.SNDHWM, _QUEUED_PER_PEER)
            socket.setsockopt(zmq.RECONNECT_IVL, 50)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            if self._curve is not None:
                self._curve.connect(socket)
            socket.connect(address)
            peer = self._peers[address] = _Peer(socket, now)
            self._close_idle(now)
        peer.used_at = now
        return peer

    def _close_idle(self, now: float) -> None:
        for address, peer in list(self._peers.items()):
            if now - peer.used_at > _IDLE_PEER_S:
                del self._peers[address]
                peer.socket.close(linger=0)

    def _receive(self) -> bool:
        """Queue what has arrived. A frame that is not ours is counted and named, and costs nothing else."""
        received = False
        for _ in range(1000):  # so that a flood cannot keep what we have to say waiting
            try:
                frames = self._inbound.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                _, sender, payload = frames
                self._inbox.put(Mail(sender.decode(), decode(payload)))
                received = True
            except (ValueError, WireError) as error:
                self.rejected_frames += 1
                log.warning("mailbox %s: rejected a frame: %s", self.address, error)
        return received
