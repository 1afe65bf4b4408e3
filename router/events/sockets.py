"""Sockets: polls the sockets of all feeds, and calls their readers. On the event plane's thread."""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq

from wire.addresses import parse_address
from wire.security import Curve

_LARGEST_BATCH = 256 << 20  # bytes


class Sockets:
    """Sockets, each with a function that reads it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], curve: Curve | None) -> None:
        self._context = context
        self._curve = curve
        self._poller = zmq.Poller()
        self._readers: dict[zmq.Socket[bytes], Callable[[float], None]] = {}

    def connect(self, kind: int, address: str, read: Callable[[float], None]) -> zmq.Socket[bytes]:
        """Open a SUB or DEALER socket. Raises WireError or ZMQError for an invalid address, and ZMQError when
        there can be no more sockets."""
        publisher = parse_address(address)
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        try:
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST_BATCH)
            if kind == zmq.SUB:
                socket.setsockopt(zmq.SUBSCRIBE, b"")
            if self._curve is not None:
                self._curve.read(socket, publisher)
            socket.connect(publisher.endpoint)
        except zmq.ZMQError:
            socket.close()
            raise
        self.watch(socket, read)
        return socket

    def watch(self, socket: zmq.Socket[bytes], read: Callable[[float], None]) -> None:
        """Call `read` with the monotonic time from `poll`, while there is something to read."""
        self._readers[socket] = read
        self._poller.register(socket, zmq.POLLIN)

    def close(self, socket: zmq.Socket[bytes]) -> None:
        """Close a socket, and poll it no more."""
        self._poller.unregister(socket)
        del self._readers[socket]
        socket.close()

    def poll(self, timeout_s: float) -> None:
        """Wait for something to read, and call its readers."""
        ready = self._poller.poll(int(timeout_s * 1000))
        now = time.monotonic()
        for socket, _ in ready:
            read = self._readers.get(socket)  # another reader may have closed it
            if read is not None:
                read(now)
