"""LMCacheStore: blobs in an LMCache server, over its own TCP protocol with the message types of its package.

The server answers no put, so a write is done when its bytes are sent. It has no command that removes: what
was read and is bad counts as absent here until it has been written again, and `clear` forgets nothing.
"""

from __future__ import annotations

import functools
import logging
import queue
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import torch
from pydantic import Field

from common.errors import ConfigError
from common.options import Options
from kvcache.storage.blob_store import BlobStore, Outcome, SealedBlob
from kvcache.storage.config import StorageConfig
from kvcache.storage.keys import VISIBILITY_BYTES

log = logging.getLogger(__name__)
Result = TypeVar("Result")
_UNPADDED = torch.Size([0, 0, 0, 0])
_MOST_BAD = 100_000


class LMCacheOptions(Options):
    """`StorageConfig.extra` of this backend."""

    connections: int = Field(default=4, ge=1, le=64)
    timeout_s: float = Field(default=10.0, gt=0)  # without a byte; then no other blob of the call is begun


class LMCacheStore(BlobStore):
    """See the module. `config.url`: lm://HOST:PORT of `lmcache_server`, which has no bound of its own."""

    name: ClassVar[str] = "lmcache"

    def __init__(self, config: StorageConfig) -> None:
        """Connections are made when they are needed. Raises ConfigError for what cannot work."""
        options = config.options(LMCacheOptions)
        found = re.fullmatch(r"lm://([^\s:/]+):(\d+)/?", config.url)
        if found is None:
            raise ConfigError(
                "hicache_storage_url", f"{config.url!r} is no lm://HOST:PORT", "name the server"
            )
        self._address = found[1], int(found[2])
        self._timeout_s = options.timeout_s
        self._protocol, self._key_class = _protocol()
        self._idle: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()
        for _ in range(options.connections):
            self._idle.put(None)
        self._lock = threading.Lock()
        self._bad: dict[bytes, None] = {}

    def exists(self, names: Sequence[bytes]) -> list[bool]:
        def ask(peer: socket.socket, name: bytes) -> Outcome:
            peer.sendall(self._message("EXIST", name, 0))
            return Outcome.MISSING if self._answer(peer) is None else Outcome.DONE

        asked = [name for name in names if name not in self._bad]
        found = self._each([functools.partial(ask, name=name) for name in asked])
        there = {name for name, outcome in zip(asked, found, strict=True) if outcome is Outcome.DONE}
        return [name in there for name in names]

    def read(self, names: Sequence[bytes], into: Sequence[SealedBlob]) -> list[Outcome]:
        works = [
            functools.partial(self._read, name=name, blob=blob)
            for name, blob in zip(names, into, strict=True)
        ]
        return self._each(works)

    def write(self, names: Sequence[bytes], blobs: Sequence[SealedBlob]) -> list[Outcome]:
        works = [
            functools.partial(self._write, name=name, blob=blob)
            for name, blob in zip(names, blobs, strict=True)
        ]
        return self._each(works)

    def discard(self, name: bytes) -> bool:
        with self._lock:
            self._bad[name] = None
            if len(self._bad) > _MOST_BAD:
                del self._bad[next(iter(self._bad))]
        return True  # the server removes nothing: another try would not help

    def clear(self, prefix: bytes) -> None:
        log.warning("LMCache's server removes nothing (%s): restart it to forget", prefix or "all")

    def close(self) -> None:
        while not self._idle.empty():
            peer = self._idle.get()
            if peer is not None:
                peer.close()

    # -- one blob ----------------------------------------------------------------------------------

    def _read(self, peer: socket.socket, name: bytes, blob: SealedBlob) -> Outcome:
        peer.sendall(self._message("GET", name, 0))
        length = self._answer(peer)
        if length is None:
            return Outcome.MISSING
        if length != blob.nbytes:
            _receive(peer, memoryview(bytearray(length)))
            return Outcome.CORRUPT
        for part in blob:
            _receive(peer, part)
        return Outcome.DONE

    def _write(self, peer: socket.socket, name: bytes, blob: SealedBlob) -> Outcome:
        peer.sendall(self._message("PUT", name, blob.nbytes))
        for part in blob:
            peer.sendall(part)
        with self._lock:
            self._bad.pop(name, None)
        return Outcome.DONE

    def _message(self, command: str, name: bytes, nbytes: int) -> bytes:
        visibility = name[:VISIBILITY_BYTES].decode()
        number = int.from_bytes(name[VISIBILITY_BYTES:], "big")
        key = self._key_class(f"baton-{visibility}", 1, 0, number, torch.uint8)
        protocol = self._protocol
        message: bytes = protocol.ClientMetaMessage(
            protocol.ClientCommand[command], key, nbytes, protocol.MemoryFormat.BINARY, torch.uint8,
            torch.Size([nbytes, 0, 0, 0]) if nbytes else _UNPADDED,
        ).serialize()  # fmt: skip
        return message

    def _answer(self, peer: socket.socket) -> int | None:
        """The bytes that follow, or None for a failure."""
        kind = self._protocol.ServerMetaMessage
        head = memoryview(bytearray(kind.packlength()))
        _receive(peer, head)
        answer = kind.deserialize(bytes(head))
        return answer.length if answer.code == self._protocol.ServerReturnCode.SUCCESS else None

    def _each(self, works: Sequence[Callable[[socket.socket], Outcome]]) -> list[Outcome]:
        """One after the other. After a timeout no other is begun: each would wait as long."""
        outcomes: list[Outcome] = []
        for work in works:
            is_late = outcomes[-1:] == [Outcome.TIMEOUT]
            outcomes.append(Outcome.TIMEOUT if is_late else self._on_peer(work))
        return outcomes

    def _on_peer(self, work: Callable[[socket.socket], Outcome]) -> Outcome:
        try:
            with self._connection() as peer:
                return work(peer)
        except (TimeoutError, queue.Empty):
            return Outcome.TIMEOUT
        except (OSError, ValueError, KeyError):  # an answer that its own package cannot read
            return Outcome.IO_ERROR

    @contextmanager
    def _connection(self) -> Iterator[socket.socket]:
        """One that nobody else uses; after a failure it is made anew."""
        kept: socket.socket | None = None
        peer = self._idle.get(timeout=self._timeout_s)
        try:
            if peer is None:
                peer = socket.create_connection(self._address, self._timeout_s)
            yield peer
            kept = peer
        finally:
            if kept is None and peer is not None:
                peer.close()
            self._idle.put(kept)


def _receive(peer: socket.socket, into: memoryview) -> None:
    while into.nbytes:
        count = peer.recv_into(into)
        if not count:
            raise ConnectionError("the server has closed the connection")
        into = into[count:]


def _protocol() -> tuple[Any, Any]:
    try:
        from lmcache.utils import CacheEngineKey
        from lmcache.v1 import protocol
    except ImportError as error:
        raise ConfigError(
            "hicache_storage_backend",
            f"LMCache cannot be loaded: {error}",
            "install lmcache, without CUDA --no-deps",
        ) from None
    return protocol, CacheEngineKey
