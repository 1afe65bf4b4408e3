"""Listener: accepts a receiver's peers, one thread each, and ends them all on close.

Each peer has a thread because its work is a blocking copy into the pool that releases the GIL. There are as
many peers as sender threads in the cluster that write to this worker, and at most `_MAX_PEERS`.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Callable

from common.errors import TransferError
from kvtransfer.frames import Challenge, Gone, bound, expect_hello, send_frame
from kvtransfer.transport import Bounds

log = logging.getLogger(__name__)

_MAX_PEERS = 256
_JOIN_S = 5.0


class Listener:
    """Owns a listening socket and its peers' threads.

    `serve(sock)` runs on the peer's thread and ends by TransferError; the socket is closed after it.
    """

    def __init__(self, sock: socket.socket, serve: Callable[[socket.socket], None], name: str) -> None:
        self._socket = sock
        self._serve = serve
        self._name = name
        self._peers: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self.closing = threading.Event()
        sock.listen(64)
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)

    def start(self) -> None:
        """Begin to accept. Not in the constructor, because `serve` may use the object that owns this one."""
        self._thread.start()

    def close(self) -> None:
        """Stop accepting, break every connection, wait for the threads."""
        if self.closing.is_set():
            return
        self.closing.set()
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept(); close() alone would not
        self._thread.join(_JOIN_S)
        self._socket.close()
        with self._lock:
            peers = dict(self._peers)
            for sock in peers:
                hang_up(sock)
        for thread in peers.values():
            thread.join(_JOIN_S)

    def _accept(self) -> None:
        while not self.closing.is_set():
            try:
                sock, _ = self._socket.accept()
            except OSError as error:
                if not self.closing.is_set():
                    log.warning("%s: accept failed: %s", self._name, error)
                    self.closing.wait(0.1)  # out of descriptors: give others time to close some
                continue
            with self._lock:
                if len(self._peers) >= _MAX_PEERS or self.closing.is_set():
                    log.warning("%s: refused a peer; there are %d", self._name, len(self._peers))
                    sock.close()
                    continue
                thread = threading.Thread(
                    target=self._run, args=(sock,), name=f"{self._name}-peer", daemon=True
                )
                self._peers[sock] = thread
                thread.start()

    def _run(self, sock: socket.socket) -> None:
        try:
            self._serve(sock)
        except Gone:
            pass  # the orderly end
        except TransferError as error:
            if not self.closing.is_set():
                log.info("%s: dropped a peer: %s", self._name, error)
        finally:
            with self._lock:  # not closed while close() may be hanging up on it
                del self._peers[sock]
                sock.close()


def hang_up(sock: socket.socket) -> None:
    """Shut the socket down, which wakes a thread that is blocked on it. Its owner closes it."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        log.debug("the peer hung up first")


def greet(sock: socket.socket, token: str, bounds: Bounds) -> None:
    """Authenticate the peer. Raises TransferError when it does not know the token."""
    bound(sock, bounds.silence_s)
    nonce = secrets.token_bytes(16)
    send_frame(sock, Challenge(nonce))
    expect_hello(sock, token, nonce)
