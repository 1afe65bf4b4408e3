"""Weights come to a host once, however many replicas start there at the same time.

One replica pulls them, under a lock of the host. The others wait, and then find them. All of them map the
same files (safetensors), so the host reads them from its disk once. The lock is the kernel's (flock): it ends
with the process that has it, so a replica that is killed while it pulls makes way for the next. What is there
only in part has another name: a copy gets its own with one rename, at the end.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from common.errors import ConfigError

WAIT_S = 1800.0  # for another replica that pulls
_POLL_S = 0.1  # flock has no wait with a bound
_DIGEST = 12  # hexadecimal digits in a copy's name

Copy = Callable[[list[Path], Path, Path], None]
"""Copies these files of a directory (the second) into another (the third), which may have a part of them."""


@contextmanager
def once_per_host(lock: Path, wait_s: float = WAIT_S) -> Iterator[None]:
    """Whoever else is in here on this host is waited for. Raises ConfigError after `wait_s`."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    # A soft lock, without flock, would outlive a process that is killed.
    held = FileLock(lock, timeout=wait_s, poll_interval=_POLL_S, fallback_to_soft=False)
    try:
        held.acquire()
    except Timeout:
        raise ConfigError(
            "model",
            f"another process of this host has been pulling it for {wait_s:g} s ({lock} is locked)",
            "see what it waits for, or start again",
        ) from None
    try:
        yield
    finally:
        held.release()


def copy_files(files: list[Path], source: Path, to: Path) -> None:
    """Copy, and wait until the bytes are on the disk: a rename may be there before them."""
    for file in files:
        copied = to / file.relative_to(source)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copied)
        descriptor = os.open(copied, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def local_copy(
    source: Path, cache: Path, patterns: tuple[str, ...], wait_s: float = WAIT_S, copy: Copy = copy_files
) -> Path:
    """The copy of a checkpoint in `cache`, a directory of this host; it is made if it is not there.

    Copies are told apart by the names, sizes and times of the files, so a checkpoint that has changed is
    copied again. Nobody deletes old ones. Raises ConfigError when it cannot be copied.
    """
    files = sorted({file for pattern in patterns for file in source.glob(pattern) if file.is_file()})
    name = f"{source.name}-{_digest(source, files)}"
    copied, partial = cache / name, cache / f".{name}.partial"
    try:
        if copied.is_dir():
            return copied
        with once_per_host(cache / ".locks" / f"{name}.lock", wait_s):
            if not copied.is_dir():
                partial.mkdir(exist_ok=True)
                copy(files, source, partial)
                partial.rename(copied)
    except OSError as error:
        raise ConfigError(
            "model_cache",
            f"{source} cannot be copied to {cache}: {error}",
            "give a directory with enough space",
        ) from None
    return copied


def _digest(source: Path, files: list[Path]) -> str:
    parts = [str(source)]
    for file in files:
        about = file.stat()
        parts.append(f"{file.relative_to(source)} {about.st_size} {about.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:_DIGEST]
