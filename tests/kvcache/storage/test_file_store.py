"""The file backend: crashes, full and failing disks, bounds, many processes."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from common.errors import ConfigError
from kvcache.storage import file_io, file_store
from kvcache.storage.backend import StorageBackend
from kvcache.storage.file_io import KernelFiles
from kvcache.storage.file_store import FileStore
from kvcache.storage.keys import key_text
from tests.kvcache.storage.support import Arena, keys, open_files

PAGE = 4096
ON_DISK = 2 * PAGE  # a page, and the block with its seal


def blob_files(directory: Path) -> list[Path]:
    """The files of blobs, in a fixed order."""
    return sorted(directory.glob("??/*"))


def same(arena: Arena, hits: list[bool]) -> bool:
    """Whether every page that was said to be read is what was written."""
    return all(
        bytes(read) == bytes(page)
        for hit, read, page in zip(hits, arena.read, arena.pages, strict=True)
        if hit
    )


# -- bad pages -------------------------------------------------------------------------------------


def test_a_flipped_bit_in_each_of_100_pages_is_100_misses(tmp_path: Path) -> None:
    arena, names = Arena(100), keys(100)
    backend = open_files(tmp_path)
    assert all(backend.set(names, arena.pages))
    for number, path in enumerate(blob_files(tmp_path)):
        raw = bytearray(path.read_bytes())
        bit = number * 337 % (8 * len(raw))  # in the pages, and in some seals
        raw[bit // 8] ^= 1 << bit % 8
        path.write_bytes(raw)
    assert backend.get(names, arena.read) == [False] * 100
    assert backend.stats().refused == {"corrupt": 100}
    assert blob_files(tmp_path) == []
    assert all(backend.set(names, arena.pages))
    assert same(arena, backend.get(names, arena.read))


@pytest.mark.parametrize("length", [0, 1, PAGE - 1, PAGE, PAGE + 31, PAGE + 33, 3 * PAGE])
def test_a_torn_page_is_a_miss(tmp_path: Path, length: int) -> None:
    arena, backend = Arena(1), open_files(tmp_path)
    backend.set(keys(1), arena.pages)
    os.truncate(blob_files(tmp_path)[0], length)
    assert backend.get(keys(1), arena.read) == [False]
    assert backend.stats().refused == {"corrupt": 1}


def test_pages_of_a_swapped_name_and_links_are_misses(tmp_path: Path) -> None:
    arena, backend = Arena(2), open_files(tmp_path)
    backend.set(keys(2), arena.pages)
    one, other = blob_files(tmp_path)
    other.write_bytes(one.read_bytes())
    one.rename(tmp_path / "elsewhere")
    one.symlink_to(tmp_path / "elsewhere")
    assert backend.get(keys(2), arena.read) == [False, False]
    assert backend.stats().refused == {"corrupt": 1, "io_error": 1}


# -- restarts --------------------------------------------------------------------------------------


def test_another_process_reads_what_was_stored(tmp_path: Path) -> None:
    arena, names = Arena(4), keys(4)
    open_files(tmp_path).set(names, arena.pages)
    program = (
        "import sys; from pathlib import Path; from tests.kvcache.storage.support import *\n"
        "arena = Arena(4)\n"
        "assert open_files(Path(sys.argv[1])).get(keys(4), arena.read) == [True] * 4\n"
        "assert [bytes(p) for p in arena.read] == [bytes(p) for p in arena.pages]\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)


def test_a_lost_key_file_is_a_miss(tmp_path: Path) -> None:
    arena = Arena(2)
    open_files(tmp_path).set(keys(2), arena.pages)
    (tmp_path / "baton.key").unlink()
    backend = open_files(tmp_path)
    assert backend.get(keys(2), arena.read) == [False, False]
    assert backend.stats().refused == {}


def write_for_ever(directory: Path, arena: Arena, ready: Any) -> None:
    """Another process: it writes all pages, forgets them, and begins again."""
    backend, names = open_files(directory), keys(len(arena.pages))
    while True:
        backend.set(names, arena.pages)
        ready.set()
        backend.clear()


@pytest.mark.slow
@pytest.mark.parametrize("fsync", [False, True])
def test_a_process_killed_while_it_writes_leaves_no_torn_page(tmp_path: Path, fsync: bool) -> None:
    context = multiprocessing.get_context("fork")
    arena, names = Arena(4, 1 << 20), keys(4)
    for _ in range(15):
        ready = context.Event()
        writer = context.Process(target=write_for_ever, args=(tmp_path, arena, ready), daemon=True)
        writer.start()
        assert ready.wait(30)
        os.kill(writer.pid or 0, signal.SIGKILL)
        writer.join(30)
        assert writer.exitcode == -signal.SIGKILL
        backend = open_files(tmp_path, fsync=fsync)
        assert same(arena, backend.get(names, arena.read))
        assert backend.stats().refused == {}
        assert all(backend.set(names, arena.pages))
        arena.wipe()
        assert all(backend.get(names, arena.read))
        assert same(arena, [True] * 4)
        backend.close()


def test_what_a_killed_writer_left_goes_when_it_is_an_hour_old(tmp_path: Path) -> None:
    open_files(tmp_path).close()
    old, new = tmp_path / "partial" / "old", tmp_path / "partial" / "new"
    for path in (old, new):
        path.write_bytes(b"half a page")
    os.utime(old, (0, 0))
    open_files(tmp_path).close()
    assert not old.exists()
    assert new.exists()


def test_usage_is_counted_again_by_who_is_alone(tmp_path: Path) -> None:
    arena, backend = Arena(4), open_files(tmp_path)
    backend.set(keys(4), arena.pages)
    assert (backend.stats().blobs, backend.stats().bytes) == (4, 4 * ON_DISK)
    blob_files(tmp_path)[0].unlink()  # an operator's rm
    usage, other = tmp_path / "usage", open_files(tmp_path)
    assert int.from_bytes(usage.read_bytes(), "little") == 4 * ON_DISK
    backend.close()
    other.close()
    open_files(tmp_path).close()
    assert int.from_bytes(usage.read_bytes(), "little") == 3 * ON_DISK


@pytest.mark.parametrize("backends", [1, 2])
def test_usage_is_counted_again_when_somebody_else_has_removed_all(tmp_path: Path, backends: int) -> None:
    arena, names = Arena(8), keys(8)
    opened = [open_files(tmp_path, max_bytes=4 * ON_DISK) for _ in range(backends)]
    assert all(opened[0].set(names[:4], arena.pages[:4]))
    for path in blob_files(tmp_path):
        path.unlink()
    for index in range(4, 8):
        backend = opened[index % backends]
        assert backend.set(names[index : index + 1], arena.pages[index : index + 1]) == [True]
    assert opened[0].exists(names) == [False] * 4 + [True] * 4
    assert opened[0].stats().bytes == 4 * ON_DISK


@pytest.mark.parametrize("backends", [1, 2])
def test_what_somebody_else_has_removed_does_not_count_for_ever(tmp_path: Path, backends: int) -> None:
    arena, names = Arena(40), keys(40)
    opened = [open_files(tmp_path, max_bytes=20 * ON_DISK) for _ in range(backends)]
    assert all(opened[0].set(names[:20], arena.pages[:20]))
    for path in blob_files(tmp_path)[2:]:
        path.unlink()
    assert opened[-1].stats().bytes == 2 * ON_DISK
    assert all(opened[0].set(names[20:38], arena.pages[20:38]))
    assert len(blob_files(tmp_path)) == 20
    assert all(opened[0].set(names[38:], arena.pages[38:]))
    assert len(blob_files(tmp_path)) == 20


def test_what_others_may_write_meanwhile_is_not_counted_again(tmp_path: Path) -> None:
    arena, backend = Arena(20), open_files(tmp_path)
    assert all(backend.set(keys(20), arena.pages))
    blob_files(tmp_path)[0].unlink()  # as if it were written after its folder was counted
    assert (backend.stats().blobs, backend.stats().bytes) == (19, 20 * ON_DISK)


def test_what_cannot_be_listed_still_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena, backend = Arena(4), open_files(tmp_path)
    assert all(backend.set(keys(4), arena.pages))
    with monkeypatch.context() as broken:
        broken.setattr(file_store, "os", BrokenDisk("scandir", errno.EIO))
        assert backend.stats().bytes == 4 * ON_DISK


def test_blobs_are_counted_the_more_rarely_the_longer_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    arena, names, backend = Arena(2), keys(2), open_files(tmp_path)
    monkeypatch.setattr(file_store, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    assert backend.set(names[:1], arena.pages[:1]) == [True]
    with monkeypatch.context() as slow:
        slow.setattr(file_store, "os", SlowDisk("scandir", now, 1 / 128))  # two seconds for all folders
        assert backend.stats().blobs == 1
    assert backend.set(names[1:], arena.pages[1:]) == [True]
    now[0] += 199.0
    assert backend.stats().blobs == 1
    now[0] += 2.0
    assert backend.stats().blobs == 2
    assert backend.set(keys(1, seed="new"), arena.pages[:1]) == [True]
    now[0] += 11.0
    assert backend.stats().blobs == 3


# -- bounds ----------------------------------------------------------------------------------------


def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    arena, names = Arena(12), keys(12)
    backend = open_files(tmp_path, max_bytes=8 * ON_DISK)
    known: set[Path] = set()
    for index in range(8):
        assert backend.set(names[index : index + 1], arena.pages[index : index + 1]) == [True]
        (new,) = {*blob_files(tmp_path)} - known
        os.utime(new, (1000 + index, 1000 + index))
        known.add(new)
    assert backend.get(names[:2], arena.read[:2]) == [True, True]  # so 2 to 5 are the oldest
    assert backend.set(names[8:], arena.pages[8:]) == [True] * 4
    assert backend.exists(names) == [True] * 2 + [False] * 4 + [True] * 6
    assert backend.stats().bytes == 8 * ON_DISK


def test_a_page_larger_than_the_bound_is_refused_and_removes_none(tmp_path: Path) -> None:
    arena, large = Arena(1), Arena(1, 2 * PAGE)
    backend = open_files(tmp_path, max_bytes=ON_DISK)
    assert backend.set(keys(1), arena.pages) == [True]
    assert backend.set(keys(1, seed="large"), large.pages) == [False]
    assert backend.stats().refused == {"full": 1}
    assert backend.get(keys(1), arena.read) == [True]


def write_seeded(directory: Path, seed: int) -> None:
    """Another process: 200 pages of its own and 20 that all share."""
    backend, arena = open_files(directory, max_bytes=64 * ON_DISK), Arena(20, seed=7)
    for round_ in range(10):
        for names in (keys(20, seed=f"{seed}/{round_}"), keys(20, seed="all")):
            assert all(backend.set(names, arena.pages))  # nothing is refused
            assert same(arena, backend.get(names, arena.read))
    backend.close()


@pytest.mark.slow
def test_writers_of_several_processes_keep_one_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A look at the directory while others write may miss what each of them is writing. Here nobody looks
    # after the start: what the processes add and take back is exact.
    monkeypatch.setattr(file_store, "_HELD_S", 3600.0)
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_seeded, args=(tmp_path, seed)) for seed in range(4)]
    watching = open_files(tmp_path, max_bytes=64 * ON_DISK)
    assert watching.stats().bytes == 0
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert watching.stats().bytes <= 64 * ON_DISK
        writers[0].join(0.01)
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    assert watching.stats().bytes == len(blob_files(tmp_path)) * ON_DISK
    assert list((tmp_path / "partial").iterdir()) == []


# -- disks that fail -------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MB."""
    mounted = tmp_path / "small"
    mounted.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", mounted],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"a file system cannot be mounted here: {made.stderr.strip()}")
    yield mounted
    subprocess.run(["umount", "-l", mounted], check=True)


def test_a_full_disk_is_a_miss_and_then_the_bound(small_disk: Path) -> None:
    arena = Arena(100, 1 << 20)
    names = keys(100)
    backend = open_files(small_disk)
    stored = backend.set(names, arena.pages)
    assert 50 < sum(stored) < 100
    refused = backend.stats().refused
    assert set(refused) == {"full"}
    assert refused["full"] == stored.count(False)
    assert list((small_disk / "partial").iterdir()) == []
    hits = backend.get(names, arena.read)
    assert same(arena, hits)
    assert backend.stats().refused == refused, "a page that was cut short was stored"
    missing = hits.index(False)
    assert backend.set(names[missing:][:1], arena.pages[missing:][:1]) == [True]  # older pages made room
    backend.close()


def test_a_full_disk_of_others_is_a_miss(small_disk: Path) -> None:
    backend, arena = open_files(small_disk), Arena(2, 1 << 20)
    with (small_disk / "others").open("wb", buffering=0) as file:
        while file.write(bytes(1 << 20)) == 1 << 20:
            pass
    assert backend.set(keys(2), arena.pages) == [False, False]
    assert backend.stats().refused == {"full": 2}
    assert backend.get(keys(2), arena.read) == [False, False]
    (small_disk / "others").unlink()
    assert open_files(small_disk).set(keys(2), arena.pages) == [True, True]


def test_a_read_only_directory_is_read(small_disk: Path) -> None:
    arena, names = Arena(2), keys(2)
    first = open_files(small_disk)
    first.set(names[:1], arena.pages[:1])
    first.close()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    backend = open_files(small_disk)
    assert backend.get(names, arena.read) == [True, False]
    assert backend.set(names, arena.pages) == [True, False]
    assert backend.stats().refused == {"read_only": 1}
    backend.close()


class BrokenDisk:
    """Stands in for `os` in storage/file_io.py and file_store.py: one of its calls fails, for some paths."""

    def __init__(self, call: str, number: int, within: str = "") -> None:
        self._call, self._number, self._within = call, number, within

    def __getattr__(self, name: str) -> Any:
        return self._fail if name == self._call else getattr(os, name)

    def _fail(self, *args: Any) -> Any:
        if self._within in str(args[0]):
            raise OSError(self._number, os.strerror(self._number))
        return getattr(os, self._call)(*args)


class CountingDisk:
    """Stands in for `os` in storage/file_store.py: notes the paths that one of its calls is given."""

    def __init__(self, call: str, given: list[str]) -> None:
        self._call, self._given = call, given

    def __getattr__(self, name: str) -> Any:
        return self._noted if name == self._call else getattr(os, name)

    def _noted(self, path: str) -> Any:
        self._given.append(path)
        return getattr(os, self._call)(path)


class SlowDisk:
    """Stands in for `os` in storage/file_store.py: one of its calls takes some seconds of a test's clock."""

    def __init__(self, call: str, now: list[float], seconds: float) -> None:
        self._call, self._now, self._seconds = call, now, seconds

    def __getattr__(self, name: str) -> Any:
        return self._slow if name == self._call else getattr(os, name)

    def _slow(self, path: str) -> Any:
        self._now[0] += self._seconds
        return getattr(os, self._call)(path)


@pytest.mark.parametrize("call", ["open", "preadv", "fstat"])
def test_a_read_that_fails_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    arena, backend = Arena(3), open_files(tmp_path)
    backend.set(keys(3), arena.pages)
    with monkeypatch.context() as broken:
        broken.setattr(file_io, "os", BrokenDisk(call, errno.EIO))
        assert backend.get(keys(3), arena.read) == [False] * 3
    assert backend.stats().refused == {"io_error": 3}
    assert backend.get(keys(3), arena.read) == [True] * 3  # nothing was removed


@pytest.mark.parametrize("call", ["open", "pwritev", "fdatasync", "fsync"])
def test_a_write_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    arena, backend = Arena(3), open_files(tmp_path, fsync=True)
    with monkeypatch.context() as broken:
        broken.setattr(file_io, "os", BrokenDisk(call, errno.EIO))
        assert backend.set(keys(3), arena.pages) == [False] * 3
    assert backend.stats().refused == {"io_error": 3}
    assert backend.stats().bytes == 0
    assert blob_files(tmp_path) == [*(tmp_path / "partial").iterdir()] == []
    assert backend.set(keys(3), arena.pages) == [True] * 3


@pytest.mark.parametrize("kept", [0, 3])
def test_a_disk_that_was_full_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    now = [1000.0]
    monkeypatch.setattr(file_store, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    arena, names, backend = Arena(8), keys(8), open_files(tmp_path)
    assert all(backend.set(names[:kept], arena.pages[:kept]))
    with monkeypatch.context() as broken:
        broken.setattr(file_io, "os", BrokenDisk("pwritev", errno.ENOSPC))
        assert backend.set(names[kept : kept + 1], arena.pages[:1]) == [False]
    assert backend.set(names[kept : kept + 1], arena.pages[:1]) == [kept > 0]
    assert len(blob_files(tmp_path)) == kept, "the disk is the bound"
    now[0] += 60.0
    assert all(backend.set(names, arena.pages))
    assert len(blob_files(tmp_path)) == 8


@pytest.mark.parametrize("call", ["scandir", "unlink"])
def test_a_clear_that_fails_says_so_and_removes_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    arena, backend = Arena(3), open_files(tmp_path)
    backend.set(keys(3), arena.pages)
    stays = blob_files(tmp_path)[0]
    with monkeypatch.context() as broken:
        broken.setattr(file_store, "os", BrokenDisk(call, errno.EACCES, f"/{stays.parent.name}"))
        with pytest.raises(PermissionError):
            backend.clear()
    assert blob_files(tmp_path) == [stays]
    assert backend.stats().bytes == ON_DISK
    assert backend.clear() == (1, ON_DISK)


def test_a_file_that_stays_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena, backend = Arena(2), open_files(tmp_path)
    backend.set(keys(2), arena.pages)
    with monkeypatch.context() as broken:
        broken.setattr(file_store, "os", BrokenDisk("unlink", errno.EIO))
        assert backend.remove(keys(2)) == [False, False]
    assert backend.remove(keys(2)) == [True, True]
    assert blob_files(tmp_path) == []


def test_a_removed_directory_is_made_again(tmp_path: Path) -> None:
    directory = tmp_path / "pages"
    arena, backend = Arena(2), open_files(directory)
    backend.set(keys(2), arena.pages)
    for path in sorted(directory.glob("**/*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert backend.get(keys(2), arena.read) == [False, False]
    assert backend.set(keys(2), arena.pages) == [True, True]
    assert backend.get(keys(2), arena.read) == [True, True]


def test_a_directory_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="storage_path"):
        FileStore(tmp_path / "file" / "pages", 0, KernelFiles())


# -- any order -------------------------------------------------------------------------------------

PAGES = 6


class FileMachine(RuleBasedStateMachine):
    """Two backends of one directory; pages are stored, read, spoilt, removed, and backends opened again."""

    @initialize(fits=st.integers(2, 8))
    def open(self, fits: int) -> None:
        self.made = tempfile.TemporaryDirectory()
        self.directory = Path(self.made.name)
        self.fits = fits
        self.arena, self.names = Arena(PAGES), keys(PAGES)
        self.backends: list[StorageBackend] = [self.opened(), self.opened()]
        self.spoilt: set[str] = set()

    def opened(self) -> StorageBackend:
        return open_files(self.directory, max_bytes=self.fits * ON_DISK)

    @rule(which=st.integers(0, 1), page=st.integers(0, PAGES - 1), count=st.integers(1, 3))
    def store(self, which: int, page: int, count: int) -> None:
        chosen = slice(page, page + count)
        there = self.backends[which].exists(self.names[chosen])
        stored = self.backends[which].set(self.names[chosen], self.arena.pages[chosen])
        assert all(stored)
        assert len(there) == len(stored)

    @rule(which=st.integers(0, 1))
    def read(self, which: int) -> None:
        self.arena.wipe()
        hits = self.backends[which].get(self.names, self.arena.read)
        assert same(self.arena, hits)
        assert not {path.name for path in blob_files(self.directory)} & self.spoilt
        self.spoilt.clear()

    @rule(page=st.integers(0, PAGES - 1), bit=st.integers(0, 8 * (PAGE + 32) - 1))
    def spoil(self, page: int, bit: int) -> None:
        """One bit of a page that is there. Which are there depends on the clock: the oldest go first."""
        name = key_text(self.names[page])
        path = next((path for path in blob_files(self.directory) if path.name == name), None)
        if path is None or name in self.spoilt:
            return
        raw = bytearray(path.read_bytes())
        raw[bit // 8] ^= 1 << bit % 8
        path.write_bytes(raw)
        self.spoilt.add(path.name)

    @rule(which=st.integers(0, 1))
    def reopen(self, which: int) -> None:
        self.backends[which].close()
        self.backends[which] = self.opened()

    @rule(which=st.integers(0, 1))
    def clear(self, which: int) -> None:
        self.backends[which].clear()
        assert blob_files(self.directory) == []

    @invariant()
    def usage_is_what_is_there(self) -> None:
        used = len(blob_files(self.directory)) * ON_DISK
        assert used <= self.fits * ON_DISK
        assert all(backend.stats().bytes == used for backend in self.backends)
        self.spoilt &= {path.name for path in blob_files(self.directory)}

    def teardown(self) -> None:
        if hasattr(self, "made"):
            for backend in self.backends:
                backend.close()
            self.made.cleanup()


TestFileMachine = FileMachine.TestCase


def test_a_sample_is_enough_where_there_are_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_store, "_SAMPLE", 10)
    arena, names = Arena(60), keys(60)
    backend = open_files(tmp_path, max_bytes=40 * ON_DISK)
    assert all(backend.set(names, arena.pages))
    assert backend.stats().bytes <= 40 * ON_DISK
    assert sum(backend.exists(names)) >= 30


def test_one_sample_serves_many_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena, names = Arena(16), keys(16)
    backend = open_files(tmp_path, max_bytes=8 * ON_DISK)
    assert all(backend.set(names[:8], arena.pages[:8]))
    for path in blob_files(tmp_path):
        os.utime(path, (1000, 1000))
    listed: list[str] = []
    monkeypatch.setattr(file_store, "os", CountingDisk("scandir", listed))
    assert backend.set(names[8:9], arena.pages[8:9]) == [True]
    first = len(listed)
    assert all(backend.set(names[9:12], arena.pages[9:12]))
    assert len(listed) == first, "the older half makes room for four"
    assert backend.exists(names[8:12]) == [True] * 4
    assert sum(backend.exists(names[:8])) == 4


def test_what_was_used_since_the_sample_stays(tmp_path: Path) -> None:
    arena, names = Arena(8), keys(8)
    backend = open_files(tmp_path, max_bytes=4 * ON_DISK)
    made: list[Path] = []
    for index in range(4):
        assert backend.set(names[index : index + 1], arena.pages[index : index + 1]) == [True]
        made += {*blob_files(tmp_path)} - {*made}
        os.utime(made[index], (1000 + index, 1000 + index))
    assert backend.set(names[4:5], arena.pages[4:5]) == [True]  # 0 goes, and 1 would be the next
    assert backend.get(names[1:2], arena.read[1:2]) == [True]
    assert backend.set(names[5:6], arena.pages[5:6]) == [True]
    assert backend.exists(names[:6]) == [False, True, False, True, True, True]


def test_files_that_cannot_be_removed_say_why_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena, names = Arena(5), keys(5)
    backend = open_files(tmp_path, max_bytes=4 * ON_DISK)
    assert all(backend.set(names[:4], arena.pages[:4]))
    with monkeypatch.context() as broken:
        broken.setattr(file_store, "os", BrokenDisk("unlink", errno.EPERM))
        assert backend.set(names[4:], arena.pages[4:]) == [False]
    assert backend.stats().refused == {"read_only": 1}
    assert backend.set(names[4:], arena.pages[4:]) == [True]
