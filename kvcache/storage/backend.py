"""StorageBackend: what the storage tier asks of a place that keeps pages, and StorageStats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvcache.storage.blob_store import Held


@dataclass(frozen=True)
class StorageStats:
    """What a backend holds, and what it has done since it was opened."""

    blobs: int = 0  # held; 0 if the place does not say
    bytes: int = 0  # held, with what the place adds to each blob; 0 if it does not say
    hits: int = 0  # blobs read
    misses: int = 0  # blobs asked for by `get` and not read, for whatever reason
    written: int = 0  # blobs stored; without those that were there already
    refused: Mapping[str, int] = field(default_factory=dict)  # blobs not read or not written, by cause
    read_bytes: int = 0
    written_bytes: int = 0
    read_seconds: float = 0.0  # of all threads together
    write_seconds: float = 0.0  # likewise


class StorageBackend(ABC):
    """Blobs under keys. A blob is one page of one KV group, or one state; a key names it (storage/keys.py).

    All methods may be called by several threads at once, except `register` and `close`. They block for at
    most the backend's own bound, and raise nothing for a blob that is missing, torn, changed, sealed with
    another secret or out of reach: that is a miss. Each is counted in `stats().refused` under its cause:

        "corrupt"      the blob is not what was stored under this key, or has another size
        "io_error"     the place failed: EIO, a connection that broke, an owner that died
        "full"         there is no room, and none could be made
        "read_only"    the place takes nothing
        "timeout"      it took longer than the backend's bound
    """

    name: str  # of the backend, for logs and metrics

    @abstractmethod
    def register(self, arenas: Sequence[memoryview]) -> None:
        """Say once, before anything else, in which memory the pages below lie: all arenas of the host tier.
        They must outlive the backend. Raises ConfigError if the backend cannot use them."""

    @abstractmethod
    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether `get` would most likely find each of them. Nothing is read of the blobs."""

    @abstractmethod
    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        """Read each blob straight into a host page of its size, and check it. False: a miss, and the page's
        contents are undefined."""

    @abstractmethod
    def set(self, keys: Sequence[bytes], blobs: Sequence[memoryview]) -> list[bool]:
        """Store each host page. The caller keeps them unchanged until it returns. True: stored, or there
        already; what is there already is kept."""

    @abstractmethod
    def remove(self, keys: Sequence[bytes]) -> list[bool]:
        """Forget these blobs, as far as the place can: LMCache's server cannot, and only this process stops
        reading them. False: this one may still be there, and can be tried again."""

    @abstractmethod
    def clear(self, prefix: bytes = b"") -> Held | None:
        """Forget all blobs whose keys begin so: those of one visibility, or all. Returns what was removed, 0
        where the place does not say; None if it can remove nothing by prefix. Raises what the place does,
        also if a part of them stays."""

    @abstractmethod
    def stats(self) -> StorageStats:
        """Asks the place what it holds, and blocks as long as it does. Its answer may be some seconds old."""

    @abstractmethod
    def last_stats(self) -> StorageStats:
        """As `stats`, but what the place holds is what it has said last. Never blocks."""

    @abstractmethod
    def close(self) -> None:
        """Let go of files, connections and registered memory. What is stored stays."""
