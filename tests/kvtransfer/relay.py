"""A relay between a sender and a receiver on TCP: it records what the sender says, and may change it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from wire.messages.transfer import TransferEndpoint

Change = Callable[[bytes, int], bytes]
"""From bytes of the sender, and the number that it has sent before, to what is passed on."""


class Relay:
    """Listens on a port of its own and passes everything on to the endpoint."""

    def __init__(self, behind: TransferEndpoint, change: Change = lambda data, _: data) -> None:
        self._behind = behind
        self._change = change
        self._server = socket.create_server(("127.0.0.1", 0))
        self._socks: list[socket.socket] = [self._server]
        self._threads: list[threading.Thread] = []
        self.said: list[bytearray] = []  # by the sender, on each of its connections
        self._start(self._accept)

    @property
    def endpoint(self) -> TransferEndpoint:
        """The endpoint, reached through this relay."""
        host, port = self._server.getsockname()
        return TransferEndpoint(self._behind.backend, f"{host}:{port}", self._behind.params)

    def close(self) -> None:
        """Break every connection and end the threads."""
        for sock in self._socks:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for sock in self._socks:
            sock.close()

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                sender, _ = self._server.accept()
                host, _, port = self._behind.address.rpartition(":")
                receiver = socket.create_connection((host, int(port)))
                self._socks += [sender, receiver]
                said = bytearray()
                self.said.append(said)
                self._start(self._pass_on, sender, receiver, said)
                self._start(self._pass_on, receiver, sender, None)

    def _pass_on(self, source: socket.socket, target: socket.socket, said: bytearray | None) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if said is None:
                    target.sendall(data)
                else:
                    before = len(said)
                    said += data
                    target.sendall(self._change(data, before))
        for sock in (source, target):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
