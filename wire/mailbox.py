"""Mailbox: a process's address for typed messages, with an I/O thread of its own.

Every process has exactly one. The router's runs on its event loop (wire/loop_mailbox.py). The sockets and the
form of a frame are in wire/sockets.py.

A mailbox owns one I/O thread, the only one that uses the sockets. `send` may be called from any thread;
`take` and `wait` are for one consumer. Sending never blocks and never raises: a message that cannot be
queued is counted in `dropped`. ZeroMQ promises neither delivery nor order across reconnects, so a sender
that needs an answer repeats its message (wire/retransmitter.py), and a receiver asks again for what it
misses (Resend).
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections import deque

import zmq

from common.errors import ConfigError
from common.host import LOOPBACK
from common.ports import ANY_PORT, Ports
from wire.addresses import draw_key
from wire.holds import Hold
from wire.messages.any_message import AnyMessage
from wire.peer_monitors import PEER_CHECK_S, PeerState
from wire.security import Curve
from wire.sockets import Inbound, Mail, PeerSockets, open_context
from wire.zap import ZapHandler, end_context

__all__ = ["Mail", "Mailbox"]

_AT_ONCE = 1000  # messages read before pending ones are sent


class Mailbox:
    """An address for typed messages. Close it, or use it as a context manager."""

    def __init__(
        self,
        interface: str = LOOPBACK,
        curve: Curve | None = None,
        port: int = 0,
        *,
        ports: Ports = ANY_PORT,
        key: str | None = None,
    ) -> None:
        """Bind one of `ports` on `interface`; or `port`, at which peers also find this process's successor.

        `key`: of another mailbox of this process; "": none, as at a fixed port. Raises ConfigError when no
        port can be had.
        """
        self._context = open_context()
        self._zap = None if curve is None else ZapHandler(self._context)
        own = draw_key() if key is None else key
        self.key = "" if port else own  # not used in a cluster with a secret
        place = Ports(str(port)) if port else ports
        try:
            self._inbound = Inbound(self._context, interface, curve, place, self.key)
        except ConfigError:
            end_context(self._context, self._zap)
            raise
        self.address = self._inbound.address
        self._peers = PeerSockets(self._context, self.address, curve, self._on_peer)
        self._states: dict[str, PeerState] = {}  # of peers that have changed, until taken
        self._states_lock = threading.Lock()
        self._watched: frozenset[str] = frozenset()
        self._outbox: deque[tuple[str, AnyMessage | None]] = deque()
        self._inbox: queue.SimpleQueue[Mail | None] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Not in `close`: another thread may just be sending. Not at exit: the I/O thread may still run.
        weakref.finalize(self, os.close, self._wake_fd).atexit = False
        self._wake_pending = False
        self._closing = False
        self.beats = 0  # rounds of the I/O thread, several a second
        self._thread = threading.Thread(target=self._run, name="mailbox", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the threads live."""
        return self._thread.is_alive() and (self._zap is None or self._zap.running)

    @property
    def dropped(self) -> int:
        """Messages that could not be queued for their peer."""
        return self._peers.dropped

    @property
    def rejected_messages(self) -> int:
        """Messages that did not decode."""
        return self._inbound.rejected_messages

    def send(self, to: str, message: AnyMessage) -> None:
        """Queue a message for the mailbox at `to`. Never blocks; delivery is not promised."""
        self._outbox.append((to, message))
        self._wake()

    def forget(self, peer: str) -> None:
        """Drop the connection to a peer that is gone, and what is queued for it."""
        self._outbox.append((peer, None))
        self._wake()

    def watch(self, peers: frozenset[str]) -> None:
        """Stay connected to these peers, so that their states are reported though nothing is sent.

        Any others are closed when they are idle, those of the last call too. The state of a peer that was not
        watched before is reported again if it is known.
        """
        if peers != self._watched:
            self._watched = peers
            self._wake()

    def connections(self, holder: str, now: float) -> list[Hold]:
        """The connections of `holder`, this process, to peers that are not watched."""
        return self._peers.connections(holder, now)

    def take_peers(self) -> dict[str, PeerState]:
        """The peers that have come up or gone down since the last call, by address. One that goes down ends a
        `wait`."""
        if not self._states:
            return {}
        with self._states_lock:
            states, self._states = self._states, {}
        return states

    def take(self) -> list[Mail]:
        """All mail that has arrived, without waiting."""
        mail: list[Mail] = []
        while True:
            try:
                piece = self._inbox.get_nowait()
            except queue.Empty:
                return mail
            if piece is not None:
                mail.append(piece)

    def wait(self, timeout_s: float) -> list[Mail]:
        """All mail that has arrived; if there is none, what arrives first within `timeout_s`, or nothing.

        Returns early, perhaps with nothing, after a `nudge`.
        """
        try:
            first = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return []
        return [first, *self.take()] if first is not None else self.take()

    def nudge(self) -> None:
        """Make a `wait` in progress, or the next one, return: something other than mail needs attention."""
        self._inbox.put(None)

    def close(self) -> None:
        """Stop the I/O thread and free the port. What is queued gets half a second to leave."""
        if self._closing:
            return
        self._closing = True
        self._wake()
        self._thread.join(timeout=5.0)
        end_context(self._context, self._zap)

    def __enter__(self) -> Mailbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wake(self) -> None:
        """Let the I/O thread flush.

        No lock: the thread clears `_wake_pending` before it looks for messages, so whoever finds it set has
        queued its message in time. A lock would be held across a call that gives the interpreter away.
        """
        if not self._wake_pending:
            self._wake_pending = True
            os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._inbound.socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        poller.register(self._peers.descriptor, zmq.POLLIN)
        check_at = 0.0
        while not self._closing:
            self.beats += 1
            ready = dict(poller.poll(int(PEER_CHECK_S * 1000)))
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
                self._wake_pending = False
            self._flush()
            if self._inbound.socket in ready:
                for mail in self._inbound.receive(_AT_ONCE)[0]:
                    self._inbox.put(mail)
            now = time.monotonic()
            if now >= check_at or self._peers.descriptor in ready:
                check_at = now + PEER_CHECK_S
                self._peers.check(now)
                self._inbound.check(now)
        self._flush()
        self._peers.close()

    def _on_peer(self, address: str, state: PeerState) -> None:
        with self._states_lock:
            self._states[address] = state
        if state is PeerState.DOWN:
            self.nudge()

    def _flush(self) -> None:
        watched = self._watched
        if watched != self._peers.watched:
            self._peers.watch(watched)
        while self._outbox:
            address, message = self._outbox.popleft()
            if message is None:
                self._forget(address)
            else:
                self._peers.send(address, message)
        self._peers.flush()

    def _forget(self, address: str) -> None:
        self._peers.forget(address)
        with self._states_lock:
            self._states.pop(address, None)
