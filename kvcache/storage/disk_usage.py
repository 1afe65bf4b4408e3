"""DiskUsage: how many bytes all processes keep in one directory, so that all together keep a bound."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_COUNT_BYTES = 8
_SLACK = 16  # a number that is wrong by less than this part of it is left


class DiskUsage:
    """A number in a file, changed under a lock of the file: the kernel's, which ends with the process.

    Bytes are added before they are written and taken back after they were removed. So a process that is
    killed in between, or somebody else who removes files, leaves the number too large, never too small;
    `recount` by the next process that is alone in the directory, by `add_recounted` or by `correct`, puts it
    right.
    """

    def __init__(self, path: Path, recount: Callable[[], int]) -> None:
        """`recount` adds up what is there. Raises OSError if the directory cannot be written to."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._users = os.open(f"{path}.users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._lock = threading.Lock()  # the file's lock is one for all threads
        self._recount = recount
        with self._locked():
            if self._is_alone() or os.fstat(self._descriptor).st_size < _COUNT_BYTES:
                self._write(recount())
            fcntl.flock(self._users, fcntl.LOCK_SH)

    def add(self, nbytes: int, bound: int) -> bool:
        """Count these bytes if all of them stay within `bound`; otherwise count nothing and return False."""
        with self._locked():
            return self._add(nbytes, bound)

    def add_recounted(self, nbytes: int, bound: int) -> bool:
        """As `add`, but what does not fit has another try after what is there was counted again.

        What other threads and processes are writing meanwhile, one blob each, may be missing in the number
        or be there twice.
        """
        with self._locked():
            if self._add(nbytes, bound):  # somebody else has counted
                return True
            self._write(self._recount())
            return self._add(nbytes, bound)

    def correct(self, found: int) -> None:
        """A caller has found `found` bytes; others may have written and removed some meanwhile. If the number
        is far from that, what is there is counted again, as by `add_recounted`."""
        with self._locked():
            counted = self._read()
            if abs(counted - found) * _SLACK > counted:
                self._write(self._recount())

    def subtract(self, nbytes: int) -> None:
        """These bytes are gone."""
        with self._locked():
            self._write(max(0, self._read() - nbytes))

    def total(self) -> int:
        """Of all processes, now."""
        with self._locked():
            return self._read()

    def close(self) -> None:
        """This process uses the directory no more."""
        os.close(self._users)
        os.close(self._descriptor)

    def _is_alone(self) -> bool:
        try:
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _add(self, nbytes: int, bound: int) -> bool:
        total = self._read() + nbytes
        if total > bound:
            return False
        self._write(total)
        return True

    def _read(self) -> int:
        return int.from_bytes(os.pread(self._descriptor, _COUNT_BYTES, 0), "little")

    def _write(self, total: int) -> None:
        os.pwrite(self._descriptor, total.to_bytes(_COUNT_BYTES, "little"), 0)
