"""SlowStore: files, each of whose reads takes as long as it is told."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

from kvcache.storage.blob_store import Outcome, SealedBlob
from kvcache.storage.config import StorageConfig
from kvcache.storage.file_io import KernelFiles
from kvcache.storage.file_store import FileStore


class SlowStore(FileStore):
    """The backend `bench.slow_store:SlowStore`. Its extra option `read_s`: seconds that a blob's read
    takes."""

    name: ClassVar[str] = "slow"

    def __init__(self, config: StorageConfig) -> None:
        assert config.path is not None, "a bench names the directory"
        super().__init__(config.path, config.max_bytes, KernelFiles(fsync=False, direct=False))
        self._read_s = float(config.extra["read_s"])

    def read(self, names: Sequence[bytes], into: Sequence[SealedBlob]) -> list[Outcome]:
        """See BlobStore."""
        started = time.monotonic()
        outcomes = super().read(names, into)
        time.sleep(max(0.0, started + len(names) * self._read_s - time.monotonic()))
        return outcomes
