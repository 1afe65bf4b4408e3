"""KernelFiles: files of blobs by the kernel's calls, through its page cache or past it."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading

import numpy as np

from kvcache.storage.blob_store import SealedBlob
from kvcache.storage.files import BlobFiles, WrongSize

BLOCK = 4096
"""What O_DIRECT asks of addresses, sizes and offsets, on any disk."""
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW


class KernelFiles(BlobFiles):
    """`direct`: the page cache is left out by O_DIRECT, where the file system and the page's address and size
    allow it (multiples of BLOCK), and emptied of the file afterwards where not."""

    def __init__(self, *, fsync: bool = False, direct: bool = False) -> None:
        """`fsync`: a file is on the disk when `write` returns."""
        self._fsync = fsync
        self._direct = direct

    def read(self, path: str, blob: SealedBlob) -> float:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
        try:
            direct = self._direct and _goes_past_the_cache(descriptor, blob.page)
            changed = os.fstat(descriptor).st_mtime
            tail = _tail()
            if os.preadv(descriptor, [blob.page, tail], 0) != blob.nbytes:
                raise WrongSize
            blob.seal[:] = tail[: blob.seal.nbytes]
            if self._direct and not direct:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            return changed
        finally:
            os.close(descriptor)

    def write(self, path: str, blob: SealedBlob) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
        try:
            direct = self._direct and _goes_past_the_cache(descriptor, blob.page)
            if direct:
                tail = _tail()
                tail[: blob.seal.nbytes] = blob.seal
                _write_all(descriptor, [blob.page, tail])
                os.ftruncate(descriptor, blob.nbytes)
            else:
                _write_all(descriptor, list(blob))
            if self._fsync or self._direct:
                os.fdatasync(descriptor)
            if self._direct and not direct:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def sync_directory(path: str) -> None:
    """What was linked or renamed there is on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, parts: list[memoryview]) -> None:
    """pwritev may write less, for example up to where a disk is full: the rest then says why."""
    total, at = sum(part.nbytes for part in parts), 0
    while at < total:
        at += os.pwritev(descriptor, _after(parts, at), at)


def _after(parts: list[memoryview], skipped: int) -> list[memoryview]:
    rest = []
    for part in parts:
        rest.append(part[min(skipped, part.nbytes) :])
        skipped = max(0, skipped - part.nbytes)
    return [part for part in rest if part.nbytes]


def _goes_past_the_cache(descriptor: int, page: memoryview) -> bool:
    address: int = np.frombuffer(page, np.uint8).ctypes.data if page.nbytes else 1
    if address % BLOCK or page.nbytes % BLOCK:
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)
    except OSError:  # this file system has no direct I/O
        return False
    return True


_own = threading.local()


def _tail() -> memoryview:
    """A block of this thread: longer than any seal, so that what follows one is seen."""
    if not hasattr(_own, "tail"):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # or a forked process would have the same block
        _own.tail = memoryview(mmap.mmap(-1, BLOCK, flags=flags))
    tail: memoryview = _own.tail
    return tail
