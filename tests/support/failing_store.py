"""FailingStore: files whose every n-th read or write fails, chosen as `module:Class`."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Sequence

from kvcache.storage.blob_store import Outcome, SealedBlob
from kvcache.storage.config import StorageConfig
from kvcache.storage.file_io import KernelFiles
from kvcache.storage.file_store import FileStore


class FailingStore(FileStore):
    """Each n-th call of `read` and of `write` fails; `every` in `extra` is n. With `fault` "raise" the call
    raises after it has done its work, with "refuse" its last blob is refused."""

    def __init__(self, config: StorageConfig) -> None:
        assert config.path is not None
        super().__init__(config.path, 0, KernelFiles())
        self._raises = config.extra["fault"] == "raise"
        self._every = int(config.extra["every"])
        self._reads, self._writes = itertools.count(1), itertools.count(1)

    def read(self, names: Sequence[bytes], into: Sequence[SealedBlob]) -> list[Outcome]:
        """See BlobStore."""
        return self._spoilt(super().read(names, into), next(self._reads))

    def write(self, names: Sequence[bytes], blobs: Sequence[SealedBlob]) -> list[Outcome]:
        """See BlobStore."""
        return self._spoilt(super().write(names, blobs), next(self._writes))

    def _spoilt(self, outcomes: list[Outcome], number: int) -> list[Outcome]:
        if number % self._every or not outcomes:
            return outcomes
        if self._raises:
            raise OSError(errno.EIO, "the disk of a test")
        return [*outcomes[:-1], Outcome.IO_ERROR]
