"""Copies of checkpoints on a host's disk, and the end of those that nobody uses any more.

A process that uses a copy holds a lock on a file beside it for as long as it lives: the kernel's, shared, so
that a killed process holds nothing. The file's time says when a copy was last seen in use. Whoever deletes a
copy has the lock under which it would be made (weights.py), so no process is just copying or about to use it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from pathlib import Path
from typing import NamedTuple

from cluster.host_lock import once_per_host
from common.errors import ConfigError

_DAY_S = 86400.0
_PARTIAL = ".partial"
_REMOVED = ".removed"
log = logging.getLogger(__name__)
_held: dict[Path, int] = {}  # descriptors of this process's locks: its end releases them


class ModelCache(NamedTuple):
    """Where the copies are, and for how many days one is kept that nobody uses."""

    directory: Path
    days: float

    def remove_unused(self) -> None:
        """Delete what nobody has used for so long. What cannot be deleted is logged."""
        try:
            for entry in sorted(self.directory.iterdir()):
                if (lock := lock_of(self.directory, _name(entry))).exists():
                    self._remove(entry, lock)
        except OSError as error:
            log.warning("old copies in %s are not deleted: %s", self.directory, error)

    def _remove(self, entry: Path, lock: Path) -> None:
        try:
            with once_per_host(lock, wait_s=0.0):
                if not entry.exists() or _is_used(entry) or not self._is_old(entry):
                    return
                removed = entry.with_name(f".{_name(entry)}{_REMOVED}")
                if entry != removed:
                    entry.rename(removed)  # at once: nobody finds a part of it
                shutil.rmtree(removed)
        except ConfigError:  # it is being copied or taken into use
            return
        log.info("%s was not used for %g days and is deleted", entry, self.days)

    def _is_old(self, entry: Path) -> bool:
        """What is left of a deletion is, too."""
        if entry.name.endswith(_REMOVED):
            return True
        times = [path.stat().st_mtime for path in (entry, _users(entry)) if path.exists()]
        return time.time() - max(times) >= self.days * _DAY_S


def partial_of(copied: Path) -> Path:
    """Where a copy is made."""
    return copied.with_name(f".{copied.name}{_PARTIAL}")


def lock_of(cache: Path, name: str) -> Path:
    """The lock under which a copy is made, taken into use and deleted."""
    return cache / ".locks" / f"{name}.lock"


def hold(copied: Path) -> None:
    """Use a copy until this process ends. The caller has its lock. Raises OSError."""
    descriptor = _held.get(copied)
    if descriptor is None:
        descriptor = os.open(_users(copied), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        _held[copied] = descriptor
    os.utime(descriptor)


def _is_used(entry: Path) -> bool:
    """Whether a process holds a copy. If so, that was now. The caller has the copy's lock."""
    if not _users(entry).exists():
        return False
    with _users(entry).open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.utime(file.fileno())
            return True
    return False


def _users(entry: Path) -> Path:
    return entry.parent / ".locks" / f"{_name(entry)}.users"


def _name(entry: Path) -> str:
    """The copy's name, of what is left of one, too."""
    if entry.name.startswith(".") and entry.name.endswith((_PARTIAL, _REMOVED)):
        return entry.name[1:].removesuffix(_PARTIAL).removesuffix(_REMOVED)
    return entry.name
