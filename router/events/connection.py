"""PublisherConnection: the sockets to one stream of KV events. On the event plane's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import zmq

from router.events.sockets import Sockets
from wire.records import WorkerRecord

_AT_ONCE = 1000  # messages of one publisher, so that others get their turn


class EventSource(NamedTuple):
    """The addresses of one stream of a worker's KV events: of its public pages, or of its private ones."""

    name: str  # of the worker and the stream, for people
    events: str
    replay: str  # "": nothing can be replayed
    is_private: bool = False


def sources_of(record: WorkerRecord) -> list[EventSource]:
    """The streams that a worker publishes."""
    sources = []
    if record.events:
        sources.append(EventSource(record.id, record.events, record.replay))
    if record.private_events:
        name = f"{record.id} (private pages)"
        sources.append(EventSource(name, record.private_events, record.private_replay, is_private=True))
    return sources


class PublisherConnection:
    """Live batches by SUB, replays by DEALER, and for external engines a monitor of the SUB's connection.

    Baton's workers have new addresses after a restart. An external engine may come back at its old ones, so
    it matters whether its connection was lost.
    """

    def __init__(
        self,
        source: EventSource,
        is_foreign: bool,
        sockets: Sockets,
        read_live: Callable[[float], None],
        read_replay: Callable[[float], None],
    ) -> None:
        """`is_foreign`: of an external engine. The functions are called with the time when there is something
        to read. There are no sockets before `open`."""
        self._source = source
        self._is_foreign = is_foreign
        self._sockets = sockets
        self._read_live = read_live
        self._read_replay = read_replay
        self._live: zmq.Socket[bytes] | None = None
        self._replay: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None

    @property
    def is_open(self) -> bool:
        """Whether there are sockets."""
        return self._live is not None

    @property
    def can_replay(self) -> bool:
        """Whether the publisher has a replay socket."""
        return bool(self._source.replay)

    def open(self) -> None:
        """Open the sockets. Raises WireError or ZMQError if one cannot be opened; then call `close`."""
        self._live = self._sockets.connect(zmq.SUB, self._source.events, self._read_live)
        self._replay = self._connect_replay()
        if self._is_foreign:
            monitor = self._live.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._sockets.watch(monitor, self._read_live)
            self._monitor = monitor

    def close(self) -> None:
        """Close those of the sockets that are open."""
        if self._live is not None and self._monitor is not None:
            self._live.disable_monitor()
        for socket in (self._monitor, self._live, self._replay):
            if socket is not None:
                self._sockets.close(socket)
        self._monitor = self._live = self._replay = None

    def request(self, start: int) -> bool:
        """Request a replay from number `start`. Returns False when the queue to the publisher is full."""
        assert self._replay is not None
        try:
            self._replay.send_multipart([b"", start.to_bytes(8, "big")], zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def reconnect_replay(self) -> None:
        """Replace the replay socket, so that an abandoned replay cannot mix with the next.

        Raises ZMQError if it cannot be opened; then call `close`.
        """
        if self._replay is not None:
            self._sockets.close(self._replay)
            self._replay = None
        self._replay = self._connect_replay()

    def lost(self) -> bool:
        """Read the monitor: whether the publisher has disconnected since the last call."""
        if self._monitor is None or not self._monitor.poll(0):
            return False
        self._monitor.recv_multipart(zmq.NOBLOCK)
        return True

    def live(self) -> Iterator[list[bytes]]:
        """The live messages that have come, as frames."""
        return self._messages(self._live) if self._live is not None else iter(())

    def replay(self) -> Iterator[list[bytes]]:
        """The messages of the replay that have come, until `reconnect_replay` or `close`."""
        return self._messages(self._replay) if self._replay is not None else iter(())

    def _messages(self, socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
        for _ in range(_AT_ONCE):
            if socket.closed:
                return
            try:
                yield socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def _connect_replay(self) -> zmq.Socket[bytes] | None:
        if not self._source.replay:
            return None
        return self._sockets.connect(zmq.DEALER, self._source.replay, self._read_replay)
