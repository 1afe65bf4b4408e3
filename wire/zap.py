"""ZapHandler: answers for one ZeroMQ context which CURVE keys may connect (ZeroMQ RFC 27).

The answer's user id is the key, which each frame of the connection then carries as "User-Id".
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import zmq

from common.quiet_log import QuietLog

log = logging.getLogger(__name__)

_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_KEY_BYTES = 32
_LINGER_MS = 500


class ZapHandler:
    """A thread. Make it before the context's servers bind, and close it before the context is destroyed."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], admits: Callable[[str], bool] | None = None
    ) -> None:
        """`admits` is called on this thread with each key, hexadecimal. None: all are admitted, because the
        frames prove more than the key does (wire/senders.py)."""
        self._admits = admits
        self._quiet = QuietLog(log)
        self._socket = context.socket(zmq.REP)
        self._socket.bind(_ENDPOINT)
        stop = f"inproc://zap-stop-{id(self)}"
        self._stopped, self._stop = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._stopped.bind(stop)
        self._stop.connect(stop)
        self._thread = threading.Thread(target=self._run, name="zap", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the thread lives. Without it nobody new can connect."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop the thread."""
        self._stop.send(b"")
        self._thread.join(timeout=5.0)
        for socket in (self._socket, self._stopped, self._stop):
            socket.close(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stopped, zmq.POLLIN)
        while self._stopped not in (ready := dict(poller.poll())):
            if self._socket in ready:
                self._socket.send_multipart(self._answer(self._socket.recv_multipart()))

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """ZeroMQ itself makes the request: version, id, domain, peer, identity, mechanism, credentials."""
        number, mechanism = request[1], request[5]
        assert mechanism == b"CURVE", "every server here speaks CURVE"
        key = request[6]
        text = key.hex()
        if len(key) == _KEY_BYTES and (self._admits is None or self._admits(text)):
            return [_VERSION, number, b"200", b"OK", text.encode(), b""]
        self._quiet.warning("refused a connection with the key %s", text)
        return [_VERSION, number, b"400", b"not a member", b"", b""]


def end_context(
    context: zmq.Context[zmq.Socket[bytes]], zap: ZapHandler | None, linger_ms: int = _LINGER_MS
) -> None:
    """Close a context with its handler and all its sockets. What is queued gets `linger_ms` to leave."""
    if zap is not None:
        zap.close()
    context.destroy(linger=linger_ms)
