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
from collections.abc import Callable
from pathlib import Path

from cluster.host_lock import WAIT_S, once_per_host
from cluster.model_cache import hold, lock_of, partial_of
from common.errors import ConfigError

_DIGEST = 12  # hexadecimal digits in a copy's name

Copy = Callable[[list[Path], Path, Path], None]
"""Copies these files of a directory (the second) into another (the third), which may have a part of them."""


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
    copied again. This process counts as a user of the copy until it ends (model_cache.py). Raises ConfigError
    when it cannot be copied.
    """
    files = sorted({file for pattern in patterns for file in source.glob(pattern) if file.is_file()})
    name = f"{source.name}-{_digest(source, files)}"
    copied, partial = cache / name, partial_of(cache / name)
    try:
        with once_per_host(lock_of(cache, name), wait_s):
            if not copied.is_dir():
                partial.mkdir(exist_ok=True)
                copy(files, source, partial)
                partial.rename(copied)
            hold(copied)
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
