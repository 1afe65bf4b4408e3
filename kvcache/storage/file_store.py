"""FileStore: blobs as files of one directory, which many processes, also of several hosts, may use at once.

    DIRECTORY/baton.key          the key of the seals, where the cluster has no secret
    DIRECTORY/usage              bytes that all processes keep here (storage/disk_usage.py)
    DIRECTORY/partial/           what is being written
    DIRECTORY/3f/public--...3f…  a blob; its folder is the first byte of its name's digest

A blob is written under a temporary name and then linked to its own: whoever opens its name reads all of it.
What a killed process leaves in partial/ is removed when it is an hour old.

The least recently used go first, as far as a sample shows: the folders are looked at in a random order until
SAMPLE files were seen, and the older half of them may go, one after the other as room is needed, unless they
are used meanwhile. A file's time is that of its last use.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from common.errors import ConfigError
from kvcache.storage.blob_store import BlobStore, Held, Outcome, SealedBlob
from kvcache.storage.disk_usage import DiskUsage
from kvcache.storage.file_io import BLOCK, sync_directory
from kvcache.storage.files import BlobFiles, WrongSize
from kvcache.storage.keys import VISIBILITY_BYTES, key_text

_SAMPLE = 512  # files
_FOLDERS = [f"{number:02x}" for number in range(256)]
_TOUCH_S = 1.0  # a use within that time of the last one is not noted
_STALE_S = 3600.0
_HELD_S = 10.0  # between two counts of the blobs, or
_HELD_FACTOR = 100  # so many times as long as the last one took, if that is more
_DISK_FULL_S = 30.0  # how long a disk that was full is the bound; then it is tried again
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_FULL = (errno.ENOSPC, errno.EDQUOT)


class FileStore(BlobStore):
    """See the module. It blocks as long as the disk does."""

    name: ClassVar[str] = "file"

    def __init__(self, directory: Path, max_bytes: int, files: BlobFiles, *, fsync: bool = False) -> None:
        """`max_bytes`: of all processes that use the directory; 0: as many as the disk takes.

        Without `max_bytes` too the oldest make room for some time after the disk was full. Counts what is
        there: with millions of files this takes seconds. Raises ConfigError if the directory cannot be made.
        """
        self._directory = str(directory)
        self._partial = os.path.join(self._directory, "partial")
        self._bound = max_bytes or 1 << 62
        self._disk_full = (float("-inf"), 0)  # until when, and how many bytes were kept
        self._blobs = files
        self._fsync = fsync  # of folders; files.py does that of files
        self._held = (float("-inf"), Held())  # when the blobs are counted again, and what was there
        self._evicting = threading.Lock()
        self._oldest: deque[tuple[int, str]] = deque()  # what may go next
        try:
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                "hicache_storage_path",
                f"{directory} cannot be made: {error.strerror}",
                "name a writable directory",
            ) from None
        self._usage: DiskUsage | None = None
        with suppress(OSError):  # it may be read-only: then nothing is written
            os.makedirs(self._partial, mode=0o700, exist_ok=True)
            _remove_stale(self._directory)
            self._usage = DiskUsage(
                directory / "usage", lambda: _count(self._directory, [*_FOLDERS, "partial"]).nbytes
            )

    def register(self, arenas: Sequence[memoryview]) -> None:
        self._blobs.register(arenas)

    def exists(self, names: Sequence[bytes]) -> list[bool]:
        return [os.path.exists(self._path(name)) for name in names]

    def read(self, names: Sequence[bytes], into: Sequence[SealedBlob]) -> list[Outcome]:
        return [self._read(self._path(name), blob) for name, blob in zip(names, into, strict=True)]

    def write(self, names: Sequence[bytes], blobs: Sequence[SealedBlob]) -> list[Outcome]:
        return [self._write(self._path(name), blob) for name, blob in zip(names, blobs, strict=True)]

    def discard(self, name: bytes) -> bool:
        with suppress(OSError):
            self._remove(self._path(name))
            return True
        return False

    def clear(self, prefix: bytes) -> Held:
        removed: list[int] = []
        failures: list[OSError] = []
        for path in _files(self._directory, _FOLDERS, failures):
            if os.path.basename(path).startswith(prefix.decode()):
                try:
                    removed.append(self._remove(path))
                except OSError as error:
                    failures.append(error)
        if failures:  # all that can be removed is
            raise failures[0]
        return Held(sum(1 for size in removed if size), sum(removed))

    def held(self) -> Held:
        """What others have removed goes after ten seconds; with millions of files, after some minutes."""
        due, held = self._held
        if (began := time.monotonic()) > due:
            failures: list[OSError] = []
            held = _count(self._directory, _FOLDERS, failures)
            if self._usage is not None and not failures:
                with suppress(OSError):
                    self._usage.correct(held.nbytes + _count(self._directory, ["partial"]).nbytes)
            ended = time.monotonic()
            self._held = ended + max(_HELD_S, _HELD_FACTOR * (ended - began)), held
        return held if self._usage is None else Held(held.blobs, self._usage.total())

    def close(self) -> None:
        self._blobs.close()
        if self._usage is not None:
            self._usage.close()
            self._usage = None

    # -- one blob ----------------------------------------------------------------------------------

    def _path(self, name: bytes) -> str:
        folder = f"{name[VISIBILITY_BYTES]:02x}"
        return os.path.join(self._directory, folder, key_text(name))

    def _read(self, path: str, blob: SealedBlob) -> Outcome:
        try:
            used = self._blobs.read(path, blob)
        except FileNotFoundError:
            return Outcome.MISSING
        except WrongSize:
            return Outcome.CORRUPT
        except OSError as error:
            return self._refusal(error)
        if time.time() > used + _TOUCH_S:
            with suppress(OSError):
                os.utime(path)
        return Outcome.DONE

    def _write(self, path: str, blob: SealedBlob) -> Outcome:
        if self._usage is None:
            return Outcome.READ_ONLY
        size = _on_disk(blob.nbytes)
        try:
            if not self._reserve(self._usage, size):
                return Outcome.FULL
        except OSError as error:
            return self._refusal(error)
        unfinished = os.path.join(self._partial, secrets.token_hex(16))
        try:
            self._write_file(unfinished, path, blob)
        except FileExistsError:  # another writer was faster
            self._give_back(size)
            return Outcome.PRESENT
        except OSError as error:
            self._give_back(size)
            return self._refusal(error)
        finally:
            with suppress(OSError):
                os.unlink(unfinished)
        return Outcome.DONE

    def _write_file(self, unfinished: str, path: str, blob: SealedBlob) -> None:
        try:
            self._blobs.write(unfinished, blob)
        except FileNotFoundError:  # somebody removed the directory
            os.makedirs(self._partial, mode=0o700, exist_ok=True)
            self._blobs.write(unfinished, blob)
        try:
            os.link(unfinished, path)  # unlike a rename it replaces nothing, which `usage` has counted
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            os.link(unfinished, path)
        if self._fsync:
            try:
                sync_directory(os.path.dirname(path))
            except OSError:
                os.unlink(path)  # its bytes are given back
                raise

    def _refusal(self, error: OSError) -> Outcome:
        if isinstance(error, TimeoutError):
            return Outcome.TIMEOUT
        if error.errno in _FULL:
            # For some time the disk is the bound: the next write makes room. Others may free the disk.
            if self._usage is not None:
                self._disk_full = time.monotonic() + _DISK_FULL_S, self._usage.total()
            return Outcome.FULL
        return Outcome.READ_ONLY if error.errno in _READ_ONLY else Outcome.IO_ERROR

    # -- room --------------------------------------------------------------------------------------

    def _reserve(self, usage: DiskUsage, size: int) -> bool:
        """Count a blob before it is written, and remove others until it fits. False if it cannot fit."""
        until, kept = self._disk_full
        bound = min(self._bound, kept) if time.monotonic() < until else self._bound
        if size > bound:
            return False
        while not usage.add(size, bound):
            if not self._make_room(size):  # somebody else may have removed what is counted
                return usage.add_recounted(size, bound)
        return True

    def _make_room(self, nbytes: int) -> bool:
        """Remove the oldest of a sample: `nbytes`, or fewer where it has fewer. False if nothing is there.
        Raises OSError if nothing can be removed."""
        with self._evicting:
            while not self._evict(nbytes):  # or other processes have removed the whole sample
                self._oldest = self._sample()
                if not self._oldest:
                    return False
        return True

    def _sample(self) -> deque[tuple[int, str]]:
        """Times and paths of the older half of some files, the oldest first. To list a folder takes long, and
        serves many evictions."""
        sample = []
        for folder in secrets.SystemRandom().sample(_FOLDERS, len(_FOLDERS)):
            for path in _files(self._directory, [folder]):
                with suppress(OSError):
                    sample.append((os.stat(path).st_mtime_ns, path))
            if len(sample) >= _SAMPLE:
                break
        sample.sort()
        return deque(sample[: -(-len(sample) // 2)])

    def _evict(self, nbytes: int) -> int:
        """Remove what the last sample has found, but for what was used since. How many bytes it took."""
        freed, failure = 0, None
        while freed < nbytes and self._oldest:
            changed, path = self._oldest.popleft()
            try:
                if os.stat(path).st_mtime_ns == changed:
                    freed += self._remove(path)
            except FileNotFoundError:
                pass
            except OSError as error:
                failure = error
        if failure is not None and not freed:
            raise failure
        return freed

    def _remove(self, path: str) -> int:
        """How many bytes it took; 0 if it was not there. Raises OSError if it stays."""
        try:
            size = _on_disk(os.stat(path).st_size)
            os.unlink(path)
        except FileNotFoundError:
            return 0
        self._give_back(size)
        return size

    def _give_back(self, size: int) -> None:
        if self._usage is not None:
            with suppress(OSError):
                self._usage.subtract(size)


def _files(directory: str, folders: Sequence[str], failures: list[OSError] | None = None) -> Iterator[str]:
    """Paths. `failures` gets what became of folders that are there and cannot be listed."""
    for folder in folders:
        try:
            with os.scandir(os.path.join(directory, folder)) as entries:
                for entry in entries:
                    yield entry.path
        except FileNotFoundError:
            pass
        except OSError as error:
            if failures is not None:
                failures.append(error)


def _count(directory: str, folders: Sequence[str], failures: list[OSError] | None = None) -> Held:
    blobs = nbytes = 0
    for path in _files(directory, folders, failures):
        with suppress(OSError):
            nbytes += _on_disk(os.stat(path).st_size)
            blobs += 1
    return Held(blobs, nbytes)


def _remove_stale(directory: str) -> None:
    """What was being written an hour ago belongs to nobody."""
    for path in list(_files(directory, ["partial"])):
        with suppress(OSError):
            if os.stat(path).st_mtime < time.time() - _STALE_S:
                os.unlink(path)


def _on_disk(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK
