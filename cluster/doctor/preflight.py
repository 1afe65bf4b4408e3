"""The preflight: a node listens on one port of each range for a moment, and the others connect."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

from cluster.doctor.facts import Reach, Target
from common.errors import ConfigError
from common.ports import Ports, bind_free
from wire.options import PortOptions

_CONNECT_S = 3.0
_TOKEN_BYTES = 16
_AT_ONCE = 64


class Listeners:
    """Listens at `host`, and tells whoever connects its token. Close it, or use it as a context manager."""

    def __init__(self, node: str, host: str, ports: PortOptions, uses: Sequence[str]) -> None:
        """A range without a free port is left out: the check of the ports finds it."""
        self.targets: list[Target] = []
        self._sockets: list[socket.socket] = []
        self._closing = False
        for use in uses:
            bound = _listen(host, ports.of(use))
            if bound is not None:
                token = secrets.token_bytes(_TOKEN_BYTES)
                self._sockets.append(bound)
                text = getattr(ports, use)
                self.targets.append(Target(node, use, text, host, bound.getsockname()[1], token))
        pairs = zip(self._sockets, self.targets, strict=True)
        self._threads = [
            threading.Thread(target=self._answer, args=(bound, target.token), name="preflight", daemon=True)
            for bound, target in pairs
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Free the ports."""
        self._closing = True
        for bound in self._sockets:
            with suppress(OSError):
                bound.shutdown(socket.SHUT_RDWR)  # ends the accept
            bound.close()
        for thread in self._threads:
            thread.join(timeout=_CONNECT_S)

    def __enter__(self) -> Listeners:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, bound: socket.socket, token: bytes) -> None:
        while not self._closing:
            with suppress(OSError):  # the listener is closed, or who connected has left
                connection, _ = bound.accept()
                with closing(connection):
                    connection.settimeout(_CONNECT_S)
                    connection.sendall(token)


def connect(source: str, targets: Sequence[Target]) -> list[Reach]:
    """Whether this node, called `source`, gets through to each of the targets. At most a few seconds each."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(lambda target: Reach(source, target, _try(target)), targets))


def _listen(host: str, ports: Ports) -> socket.socket | None:
    bound = socket.socket()

    def bind(port: int) -> None:
        bound.bind((host, port))

    try:
        bind_free(ports, host, bind)
        bound.listen()
    except (ConfigError, OSError):
        bound.close()
        return None
    return bound


def _try(target: Target) -> str:
    """Why the target is not reached; "" when it is."""
    try:
        with socket.create_connection((target.host, target.port), timeout=_CONNECT_S) as connection:
            heard = b""
            while len(heard) < _TOKEN_BYTES and (more := connection.recv(_TOKEN_BYTES - len(heard))):
                heard += more
    except TimeoutError:
        return f"no answer within {_CONNECT_S:g} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return "" if heard == target.token else "something else answers there"
