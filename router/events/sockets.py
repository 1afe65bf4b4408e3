"""Sockets: those of all feeds, polled together, and who reads each. On the event plane's thread."""

from __future__ import annotations

from collections.abc import Callable

import zmq

from wire.security import Curve


class Sockets:
    """The sockets of all feeds, and who reads them."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], curve: Curve | None) -> None:
        self._context = context
        self._curve = curve
        self._poller = zmq.Poller()
        self._readers: dict[zmq.Socket[bytes], Callable[[], None]] = {}

    def connect(self, kind: int, address: str, on_ready: Callable[[], None]) -> zmq.Socket[bytes]:
        """A SUB or DEALER. Raises ZMQError for an address that is none."""
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        if self._curve is not None:
            self._curve.connect(socket)
        try:
            socket.connect(address)
        except zmq.ZMQError:
            socket.close()
            raise
        self.watch(socket, on_ready)
        return socket

    def watch(self, socket: zmq.Socket[bytes], on_ready: Callable[[], None]) -> None:
        """Call `on_ready` from `poll` while there is something to read."""
        self._readers[socket] = on_ready
        self._poller.register(socket, zmq.POLLIN)

    def close(self, socket: zmq.Socket[bytes]) -> None:
        """Close it, and read it no more."""
        self._poller.unregister(socket)
        del self._readers[socket]
        socket.close()

    def poll(self, timeout_s: float) -> None:
        """Wait for something to read, and let it be read."""
        for socket, _ in self._poller.poll(int(timeout_s * 1000)):
            reader = self._readers.get(socket)  # it may have been closed by another's reader
            if reader is not None:
                reader()
