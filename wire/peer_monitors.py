"""Which peers of a mailbox answer: one ZeroMQ monitor per connection.

    connecting ---handshake---> UP ---disconnected---> (a pause) ---> DOWN
        |                       ^                          |            |
        |                       +--------handshake---------+------------+
        +---refused, or no handshake for a while---> DOWN

ZeroMQ sends a heartbeat on every connection and ends a connection whose peer does not answer. Its I/O threads
do both, in C++: a process that is busy or holds the GIL answers, one that is stopped or cut off does not. An
established TCP connection proves nothing, because the kernel accepts connections for a stopped process. Only
a ZeroMQ handshake shows that the peer runs.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import count

import zmq
from zmq.utils.monitor import recv_monitor_message

PEER_CHECK_S = 0.1
"""How often `check` should be called, even if the descriptor is silent."""

_HEARTBEAT_MS = 300
_ANSWER_MS = 1000  # a heartbeat that is not answered for so long ends the connection
_FORGET_MS = 3000  # the peer ends a connection on which it has heard nothing for so long
_CONNECT_MS = 1000  # for TCP; without a bound a connection that begins in a partition hangs for minutes
_HANDSHAKE_MS = 2000
_FIRST_S = 1.5  # for the first handshake
_PAUSE_S = 0.25  # for a new handshake after a connection was lost or refused
_OWN_GAP_S = 1.0  # between two checks: this process was stopped or blocked itself

_FAILURES = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_names = count()  # of monitors, unique in this process


class PeerState(Enum):
    """What a mailbox knows about a peer."""

    UP = "up"
    DOWN = "down"


@dataclass(slots=True)
class _Monitored:
    address: str
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    state: PeerState | None  # as reported; None: nothing was yet
    down_at: float | None  # no handshake until then: it is down. None: it is up, or that was reported


def send_heartbeats(socket: zmq.Socket[bytes]) -> None:
    """Make a connection end when its peer does not answer. Call it before `connect`."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _ANSWER_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, _FORGET_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    # A heartbeat cannot leave while the peer reads nothing and the kernel's buffers are full.
    socket.setsockopt(zmq.TCP_MAXRT, _ANSWER_MS)


class PeerMonitors:
    """Reports each change of a peer's state. Used by the thread that uses the sockets.

    `descriptor` becomes readable when there is something to `check`.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], on_peer: Callable[[str, PeerState], None]
    ) -> None:
        self._context = context
        self._on_peer = on_peer
        self._ready = select.epoll()  # of the monitors' descriptors: a check with no news is one system call
        self.descriptor = self._ready.fileno()
        self._by_address: dict[str, _Monitored] = {}
        self._by_descriptor: dict[int, _Monitored] = {}
        self._unsettled: dict[str, _Monitored] = {}  # those with `down_at`
        self._changed: list[_Monitored] = []  # to be reported
        self._checked_at = time.monotonic()

    def add(self, address: str, socket: zmq.Socket[bytes]) -> None:
        """Watch a socket that is about to connect to `address`. Raises ZMQError if it cannot."""
        endpoint = f"inproc://peer-{next(_names)}"
        socket.monitor(endpoint, _FAILURES | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        monitor = self._context.socket(zmq.PAIR)
        try:
            monitor.connect(endpoint)
        except zmq.ZMQError:
            monitor.close(linger=0)
            raise
        one = _Monitored(address, socket, monitor, None, time.monotonic() + _FIRST_S)
        descriptor = int(monitor.getsockopt(zmq.FD))
        self._by_address[address] = self._by_descriptor[descriptor] = self._unsettled[address] = one
        self._ready.register(descriptor, select.EPOLLIN)
        monitor.getsockopt(zmq.EVENTS)  # the descriptor tells of events only after a reader has found none

    def remove(self, address: str) -> None:
        """Stop watching a peer, before its socket is closed."""
        one = self._by_address.pop(address)
        descriptor = int(one.monitor.getsockopt(zmq.FD))
        del self._by_descriptor[descriptor]
        self._unsettled.pop(address, None)
        self._ready.unregister(descriptor)
        one.socket.disable_monitor()
        one.monitor.close(linger=0)

    def repeat(self, address: str) -> None:
        """Report the peer's state with the next check, if it is known, though it has not changed."""
        self._changed.append(self._by_address[address])

    def check(self, now: float) -> None:
        """Read what the monitors say, and report peers that have changed."""
        patience_s = _PAUSE_S if now - self._checked_at < _OWN_GAP_S else _OWN_GAP_S
        self._checked_at = now
        for descriptor, _ in self._ready.poll(0):
            self._read(self._by_descriptor[descriptor], now + patience_s)
        for one in [
            one for one in self._unsettled.values() if one.down_at is not None and now >= one.down_at
        ]:
            self._settle(one, PeerState.DOWN)
        changed, self._changed = self._changed, []
        for one in changed:  # last, because who is told may remove a peer
            if one.state is not None and self._by_address.get(one.address) is one:
                self._on_peer(one.address, one.state)

    def close(self) -> None:
        """Close all monitors."""
        for address in list(self._by_address):
            self.remove(address)
        self._ready.close()

    def _read(self, one: _Monitored, down_at: float) -> None:
        """Read all events of a monitor. `down_at`: when a peer that was lost just now is down."""
        # Asking for EVENTS also makes the descriptor silent again.
        while int(one.monitor.getsockopt(zmq.EVENTS)) & int(zmq.POLLIN):
            if recv_monitor_message(one.monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._settle(one, PeerState.UP)
            elif one.state is None:  # the first connection was refused
                one.down_at = min(one.down_at or down_at, down_at)
            elif one.state is PeerState.UP and one.down_at is None:
                one.down_at = down_at
                self._unsettled[one.address] = one

    def _settle(self, one: _Monitored, state: PeerState) -> None:
        self._unsettled.pop(one.address, None)
        one.down_at = None
        if one.state is not state:
            one.state = state
            self._changed.append(one)
