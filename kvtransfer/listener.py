"""Listener: accepts a receiver's peers, greets them on one thread, gives each that proves the token a thread
of its own, and ends them all on close.

A peer has a thread because its work is a blocking copy into the pool that releases the GIL. There are as many
peers as sender threads in the cluster that have written to this worker lately, and at most `_MAX_PEERS`. When
one more comes, the one that has been idle longest is dropped: its sender connects again for its next write.
While none is idle, the new one waits, at most `silence_s`.

Whoever has not proven the token is a stranger and does not count among the peers. There are at most
`_MAX_STRANGERS`, each for at most `greeting_s`; when one more comes, or descriptors run out, the oldest is
dropped. A peer that knows the token answers within a round trip, and what has come is read before any is
dropped, so strangers do not keep it out.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from common.errors import TransferError
from kvtransfer.frames import Gone, bound
from kvtransfer.greeting import Greeting
from kvtransfer.streams import Stream
from kvtransfer.transport import Bounds
from wire.messages.transfer import TransferEndpoint

log = logging.getLogger(__name__)

_MAX_PEERS = 256
_MAX_STRANGERS = 128
_BACKLOG = 128
_JOIN_S = 5.0
_LOG_EVERY_S = 10.0


class Listener:
    """Owns a listening socket, the strangers and the peers' threads.

    `serve(stream)` runs on the peer's thread and ends by TransferError; the socket is closed after it.
    """

    def __init__(
        self,
        sock: socket.socket,
        endpoint: TransferEndpoint,
        bounds: Bounds,
        serve: Callable[[Stream], None],
    ) -> None:
        self._socket = sock
        self._endpoint = endpoint
        self._bounds = bounds
        self._serve = serve
        self._name = f"kv-{endpoint.backend}"
        self._peers: dict[socket.socket, threading.Thread] = {}
        self._idle: dict[socket.socket, None] = {}  # peers between two writes, the longest idle first
        self._leaving: set[socket.socket] = set()  # peers that were dropped for others, with threads still
        self._waiting: deque[tuple[float, Stream]] = deque()  # for a place, until that time (monotonic)
        self._lock = threading.Lock()  # guards all peers
        self._strangers: dict[socket.socket, Greeting] = {}  # oldest first; the listening thread's own
        self._selector = selectors.DefaultSelector()
        self._dropped = 0  # strangers, since the last line about them in the log
        self._log_at = 0.0
        self.closing = threading.Event()
        sock.setblocking(False)
        sock.listen(_BACKLOG)
        self._selector.register(sock, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._listen, name=self._name, daemon=True)

    def start(self) -> None:
        """Begin to accept. Not in the constructor, because `serve` may use the object that owns this one."""
        self._thread.start()

    @contextmanager
    def idle(self, stream: Stream) -> Iterator[None]:
        """Around a peer's wait for its next write, on its thread: meanwhile it can be dropped for another
        one. Raises Gone then, whatever has come."""
        with self._lock:
            self._idle[stream.sock] = None
            self._admit_waiting()
        try:
            yield
        finally:
            with self._lock:
                self._idle.pop(stream.sock, None)
                is_dropped = stream.sock in self._leaving
        if is_dropped:
            raise Gone("the peer was dropped for another one")

    def close(self) -> None:
        """Stop accepting, break every connection, wait for the threads."""
        if self.closing.is_set():
            return
        self.closing.set()
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes select(); close() alone would not
        self._thread.join(_JOIN_S)
        self._socket.close()
        with self._lock:
            peers = dict(self._peers)
            for sock in peers:
                hang_up(sock)
            while self._waiting:
                self._waiting.popleft()[1].sock.close()
        for thread in peers.values():
            thread.join(_JOIN_S)

    def _listen(self) -> None:
        while not self.closing.is_set():
            ready = [key for key, _ in self._selector.select(self._until_next_deadline())]
            for key in ready:
                if key.fileobj is not self._socket:
                    self._hear(key.data)
            if any(key.fileobj is self._socket for key in ready):
                self._accept()  # after all who have said something: it may drop the oldest
            now = time.monotonic()
            while self._strangers and self._oldest().deadline <= now:
                self._drop(self._oldest(), "it said no Hello in time")
        for stranger in [*self._strangers.values()]:
            self._forget(stranger)
            stranger.sock.close()
        self._selector.close()

    def _until_next_deadline(self) -> float | None:
        return max(0.0, self._oldest().deadline - time.monotonic()) if self._strangers else None

    def _oldest(self) -> Greeting:
        return next(iter(self._strangers.values()))

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # it left again
        except OSError as error:
            if self.closing.is_set():
                return
            if self._strangers:
                self._drop(self._oldest(), f"its descriptor is needed: {error}")
            else:
                log.warning("%s: accept failed: %s", self._name, error)
                self.closing.wait(0.1)  # out of descriptors: give others time to close some
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            self._drop(self._oldest(), "too many knock")
        try:
            stranger = Greeting(sock, self._endpoint, time.monotonic() + self._bounds.greeting_s)
        except TransferError as error:
            self._count_dropped(str(error))
            sock.close()
            return
        self._strangers[sock] = stranger
        self._selector.register(sock, selectors.EVENT_READ, stranger)

    def _hear(self, stranger: Greeting) -> None:
        try:
            stream = stranger.read()
        except TransferError as error:
            self._drop(stranger, str(error))
            return
        if stream is not None:
            self._forget(stranger)
            self._admit(stream)

    def _forget(self, stranger: Greeting) -> None:
        del self._strangers[stranger.sock]
        self._selector.unregister(stranger.sock)

    def _drop(self, stranger: Greeting, reason: str) -> None:
        self._forget(stranger)
        stranger.sock.close()
        self._count_dropped(reason)

    def _count_dropped(self, reason: str) -> None:
        """Say so in the log, now and then: a line for each would be a way to fill the disk."""
        self._dropped += 1
        now = time.monotonic()
        if now >= self._log_at:
            log.info("%s: dropped %d strangers, the last because: %s", self._name, self._dropped, reason)
            self._dropped, self._log_at = 0, now + _LOG_EVERY_S

    def _admit(self, stream: Stream) -> None:
        """The peer knows the token: give it a thread, at once or when there is a place."""
        bound(stream.sock, self._bounds.silence_s)
        with self._lock:
            self._forget_late()
            if self.closing.is_set() or len(self._waiting) >= _MAX_PEERS:
                log.warning("%s: refused a peer; there are %d", self._name, len(self._peers))
                stream.sock.close()
                return
            self._waiting.append((time.monotonic() + self._bounds.silence_s, stream))
            self._admit_waiting()

    def _admit_waiting(self) -> None:
        """Give places to those who wait for one, those of idle peers included. The caller holds the lock."""
        self._forget_late()
        while self._waiting and not self.closing.is_set() and (self._idle or not self._is_full()):
            _, stream = self._waiting.popleft()
            if self._is_full():
                longest = next(iter(self._idle))
                del self._idle[longest]
                self._leaving.add(longest)
                hang_up(longest)
            self._start(stream)

    def _forget_late(self) -> None:
        """Hang up on those who waited for a place as long as their senders do. The caller holds the lock."""
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            self._waiting.popleft()[1].sock.close()

    def _start(self, stream: Stream) -> None:
        """The caller holds the lock."""
        thread = threading.Thread(target=self._run, args=(stream,), name=f"{self._name}-peer", daemon=True)
        self._peers[stream.sock] = thread
        try:
            thread.start()
        except RuntimeError as error:  # the process may have no more threads
            log.warning("%s: refused a peer: %s", self._name, error)
            del self._peers[stream.sock]
            stream.sock.close()

    def _is_full(self) -> bool:
        """The caller holds the lock."""
        return len(self._peers) - len(self._leaving) >= _MAX_PEERS

    def _run(self, stream: Stream) -> None:
        try:
            self._serve(stream)
        except Gone:
            pass  # the orderly end
        except TransferError as error:
            if not self.closing.is_set():
                log.info("%s: dropped a peer: %s", self._name, error)
        finally:
            with self._lock:  # not closed while close() may be hanging up on it
                del self._peers[stream.sock]
                self._leaving.discard(stream.sock)
                stream.sock.close()
                self._admit_waiting()


def hang_up(sock: socket.socket) -> None:
    """Shut the socket down, which wakes a thread that is blocked on it. Its owner closes it."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        log.debug("the peer hung up first")
