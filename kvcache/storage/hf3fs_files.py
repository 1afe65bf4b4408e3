"""Hf3fsFiles: files of blobs on a mounted 3FS, read and written through its user-space I/O (USRBIO).

Its rings know shared memory of their own only, so each blob is copied once. Names, bounds and removal go
through the mount, as for any directory. Its tests run with a stand-in for hf3fs_fuse.io (of hf3fs-py-usrbio);
it has not run on a 3FS yet.
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

from pydantic import Field

from common.errors import ConfigError
from common.options import Options
from kvcache.storage.blob_store import SealedBlob
from kvcache.storage.files import BlobFiles, WrongSize

_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW


class Hf3fsOptions(Options):
    """`StorageConfig.extra` of this backend."""

    largest_blob_bytes: int = Field(default=32 << 20, ge=4096)
    timeout_s: float = Field(default=10.0, gt=0)  # of one blob


class Hf3fsFiles(BlobFiles):
    """One ring for reading and one for writing, each used by one thread at a time."""

    def __init__(self, directory: Path, options: Hf3fsOptions, *, fsync: bool) -> None:
        """Raises ConfigError when the package is missing or the directory is not on a 3FS."""
        try:
            from hf3fs_fuse import io
        except ImportError as error:
            raise ConfigError(
                "hicache_storage_backend",
                f"3FS's client cannot be loaded: {error}",
                "install hf3fs-py-usrbio",
            ) from None
        self._io: Any = io
        mount = io.extract_mount_point(str(directory))
        if mount is None:
            raise ConfigError(
                "hicache_storage_path", f"{directory} is not on a 3FS", "name a directory on its mount"
            )
        self._fsync = fsync
        self._reading = _Ring(io, mount, options, is_reading=True)
        self._writing = _Ring(io, mount, options, is_reading=False)

    def read(self, path: str, blob: SealedBlob) -> float:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
        try:
            about = os.fstat(descriptor)
            if about.st_size != blob.nbytes:
                raise WrongSize
            self._reading.read(descriptor, blob)
            return about.st_mtime
        finally:
            os.close(descriptor)

    def write(self, path: str, blob: SealedBlob) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
        try:
            self._writing.write(descriptor, blob)
            os.ftruncate(descriptor, blob.nbytes)  # 3FS learns the length of a file that was written past it
            if self._fsync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        self._reading.close()
        self._writing.close()


class _Ring:
    """A ring and its shared memory, which holds one blob. After a timeout it is not used again: the transfer
    that was given up may still write there."""

    def __init__(self, io: Any, mount: str, options: Hf3fsOptions, *, is_reading: bool) -> None:
        self._io = io
        self._is_reading = is_reading
        self._timeout = timedelta(seconds=options.timeout_s)
        self._memory = SharedMemory(size=options.largest_blob_bytes, create=True)
        buffer = self._memory.buf
        assert buffer is not None
        self._buffer: memoryview = buffer
        self._ring = io.make_ioring(mount, 1, for_read=is_reading, timeout=1, numa=-1)
        self._region = io.make_iovec(self._memory, mount)
        self._memory.unlink()
        self._lock = threading.Lock()
        self._is_stuck = False

    def read(self, descriptor: int, blob: SealedBlob) -> None:
        with self._lock:
            self._move(descriptor, blob.nbytes)
            page_bytes = blob.page.nbytes
            blob.page[:] = self._buffer[:page_bytes]
            blob.seal[:] = self._buffer[page_bytes : blob.nbytes]

    def write(self, descriptor: int, blob: SealedBlob) -> None:
        with self._lock:
            if blob.nbytes <= self._memory.size:
                self._buffer[: blob.page.nbytes] = blob.page
                self._buffer[blob.page.nbytes : blob.nbytes] = blob.seal
            self._move(descriptor, blob.nbytes)

    def close(self) -> None:
        del self._ring, self._region, self._buffer
        self._memory.close()

    def _move(self, descriptor: int, nbytes: int) -> None:
        if self._is_stuck or nbytes > self._memory.size:
            raise OSError("the ring is stuck, or its memory too small")
        self._io.register_fd(descriptor)
        try:
            self._ring.prepare(self._region[:nbytes], self._is_reading, descriptor, 0)
            done = self._ring.submit().wait(min_results=1, timeout=self._timeout)
        except Exception as error:  # its errors have no base of their own
            self._is_stuck = True
            raise OSError(f"3FS: {error}") from error
        finally:
            self._io.deregister_fd(descriptor)
        if not done:
            self._is_stuck = True
            raise TimeoutError("3FS did not answer in time")
        if done[0].result != nbytes:
            raise OSError(f"3FS moved {done[0].result} of {nbytes} bytes")
