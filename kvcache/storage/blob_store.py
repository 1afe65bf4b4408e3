"""BlobStore: where sealed blobs lie. SealedStorage makes a StorageBackend of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import StrEnum
from typing import ClassVar, NamedTuple


class Outcome(StrEnum):
    """What became of one blob. All but the first three are counted as refused, under their value."""

    DONE = "done"
    MISSING = "missing"  # of a read: there is no such blob
    PRESENT = "present"  # of a write: it was there already, and is kept
    CORRUPT = "corrupt"
    IO_ERROR = "io_error"
    FULL = "full"
    READ_ONLY = "read_only"
    TIMEOUT = "timeout"


class SealedBlob(NamedTuple):
    """The memory of one blob: a host page, and the seal that follows it in the store (storage/seal.py)."""

    page: memoryview
    seal: memoryview

    @property
    def nbytes(self) -> int:
        """Of both."""
        return self.page.nbytes + self.seal.nbytes


class Held(NamedTuple):
    """What a store holds, or has removed; zeros if it does not say."""

    blobs: int = 0
    nbytes: int = 0


class BlobStore(ABC):
    """Blobs under names of the form of a key: 16 ASCII characters and 32 bytes (storage/keys.py).

    A blob is written and read in two parts, without a copy where the store can. All methods may be called by
    several threads at once, except `register` and `close`. None but `clear` raises for what a blob, a disk or
    a peer does: outcomes say it. A store checks no contents: what it reads is checked afterwards.
    """

    name: ClassVar[str]

    def register(self, arenas: Sequence[memoryview]) -> None:  # noqa: B027 - most need not know it
        """Once, before anything else: in which memory the pages lie. Raises ConfigError if it cannot be
        used."""

    @abstractmethod
    def exists(self, names: Sequence[bytes]) -> list[bool]:
        """Whether each of them is there."""

    @abstractmethod
    def read(self, names: Sequence[bytes], into: Sequence[SealedBlob]) -> list[Outcome]:
        """DONE, MISSING or a refusal for each. CORRUPT: it is not of that size."""

    @abstractmethod
    def write(self, names: Sequence[bytes], blobs: Sequence[SealedBlob]) -> list[Outcome]:
        """DONE, PRESENT or a refusal for each. A blob is there as a whole or not at all."""

    @abstractmethod
    def discard(self, name: bytes) -> bool:
        """Remove a blob. It can be written again. False: it may still be there, and another try may help; a
        store that can remove nothing says True."""

    @abstractmethod
    def clear(self, prefix: bytes) -> Held | None:
        """Remove all blobs whose names begin so. `prefix` is empty or a visibility. Returns what was removed,
        as far as the store says; None if it cannot remove by prefix. Raises if some may have stayed."""

    def held(self) -> Held:
        """What the store holds, perhaps some seconds ago."""
        return Held()

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Let go of everything. What is stored stays."""
