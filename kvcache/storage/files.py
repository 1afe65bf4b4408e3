"""BlobFiles: how FileStore reads and writes one file. The kernel does it (file_io.py), or a library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvcache.storage.blob_store import SealedBlob


class WrongSize(Exception):
    """A file is not as long as its blob."""


class BlobFiles(ABC):
    """Files of a page and the seal right behind it. Used by several threads at once."""

    def register(self, arenas: Sequence[memoryview]) -> None:  # noqa: B027 - the kernel need not know it
        """As of a BlobStore."""

    @abstractmethod
    def read(self, path: str, blob: SealedBlob) -> float:
        """Fill both parts. Returns the file's time of change, in seconds since 1970. Raises WrongSize and
        OSError."""

    @abstractmethod
    def write(self, path: str, blob: SealedBlob) -> None:
        """Make a file of both parts. Raises OSError; then a part of the file may be there."""

    def close(self) -> None:  # noqa: B027 - the kernel holds nothing
        """As of a BlobStore."""
