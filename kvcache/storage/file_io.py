"""Reads and writes one blob of a file: the page, and the seal right behind it. The page is not copied.

`direct`: the kernel's page cache is left out by O_DIRECT, where the file system and the page's address and
size allow it (multiples of BLOCK), and emptied of the file afterwards where not.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from typing import NamedTuple

import numpy as np

from kvcache.storage.blob_store import SealedBlob

BLOCK = 4096
"""What O_DIRECT asks of addresses, sizes and offsets, on any disk."""
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW


class FileMode(NamedTuple):
    """How files are read and written."""

    fsync: bool = False  # a blob is on the disk before it has its name
    direct: bool = False


class WrongSize(Exception):
    """A file is not as long as its blob."""


def read_blob(path: str, blob: SealedBlob, mode: FileMode) -> float:
    """Fill both parts. Returns when the file was last used (as `touch` noted), in seconds since 1970.

    Raises WrongSize and OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    try:
        direct = mode.direct and _goes_past_the_cache(descriptor, blob.page)
        used = os.fstat(descriptor).st_mtime
        tail = _tail()
        if os.preadv(descriptor, [blob.page, tail], 0) != blob.nbytes:
            raise WrongSize
        blob.seal[:] = tail[: blob.seal.nbytes]
        if mode.direct and not direct:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return used
    finally:
        os.close(descriptor)


def write_blob(path: str, blob: SealedBlob, mode: FileMode) -> None:
    """Make a file of both parts. Raises OSError; then a part of the file may be there."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
    try:
        direct = mode.direct and _goes_past_the_cache(descriptor, blob.page)
        if direct:
            tail = _tail()
            tail[: blob.seal.nbytes] = blob.seal
            _write_all(descriptor, [blob.page, tail])
            os.ftruncate(descriptor, blob.nbytes)
        else:
            _write_all(descriptor, list(blob))
        if mode.fsync or mode.direct:
            os.fdatasync(descriptor)
        if mode.direct and not direct:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
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
