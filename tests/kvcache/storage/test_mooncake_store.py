"""Mooncake Store: two processes share pages; dead owners and a dead master are misses."""

from __future__ import annotations

import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from kvcache.storage import mooncake_store
from kvcache.storage.backend import StorageBackend
from kvcache.storage.config import StorageConfig
from kvcache.storage.factory import open_storage
from kvcache.storage.mooncake_store import MooncakeStore
from kvcache.storage.sealed import SealedStorage
from tests.kvcache.storage.support import Arena, MooncakeMaster, free_port, keys

PAGE = 1 << 18
OWNER = """
import sys
from pathlib import Path
from tests.kvcache.storage.support import *
config = StorageConfig(backend="mooncake", path=Path(sys.argv[1]), url=sys.argv[2], max_bytes=64 << 20)
backend, arena = open_storage(config), Arena(20, 1 << 18)
backend.register([arena.memory])
assert all(backend.set(keys(20), arena.pages)), backend.stats()
print("stored", flush=True)
sys.stdin.read()
"""


@contextmanager
def opened(master: MooncakeMaster, directory: Path, lent: int = 0) -> Iterator[StorageBackend]:
    """A backend of this process; it lends nothing unless told."""
    config = StorageConfig(
        backend="mooncake", path=directory, url=master.url, max_bytes=lent, extra={"timeout_s": 8.0}
    )
    with closing(open_storage(config)) as backend:
        yield backend


@contextmanager
def owner(master: MooncakeMaster, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which has stored 20 pages in the memory that it lends."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(directory), master.url],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "stored\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


def test_others_are_told_the_address_of_an_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Refusing:
        def setup(self, *arguments: object) -> int:
            told.append(str(arguments[0]))
            return -1

    def loaded(address: str) -> type[Refusing]:
        told.append(address)
        return Refusing

    monkeypatch.setattr(mooncake_store, "_store_class", loaded)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"127.0.0.1:{listening.getsockname()[1]}"
        config = StorageConfig(backend="mooncake", path=tmp_path, url=url, extra={"interface": "lo"})
        with pytest.raises(ConfigError, match=r"cannot be set up .*\(-1\)"):
            open_storage(config)
    assert told == ["127.0.0.1"] * 2


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MooncakeMaster]:
    """One of the test's own: it is stopped, or its clients die."""
    why = MooncakeMaster.why_not()
    if why:
        pytest.skip(why)
    with closing(MooncakeMaster(tmp_path / "master.log")) as started:
        yield started


class StandIn:
    """Mooncake's store, where each test says what a call does. Nothing is set up."""

    def __init__(self) -> None:
        self.setup: Callable[..., int] = lambda *_: 0
        self.register_buffer: Callable[..., int] = lambda *_: 0
        self.batch_is_exist: Callable[..., list[int]] = lambda keys: [0] * len(keys)
        self.batch_get_into: Callable[..., list[int]] = lambda keys, *_: [-704] * len(keys)
        self.batch_get_into_multi_buffers: Callable[..., list[int]] = lambda keys, *_: [-704] * len(keys)
        self.batch_put_from_multi_buffers: Callable[..., list[int]] = lambda keys, *_: [0] * len(keys)
        self.remove_by_regex: Callable[..., int] = lambda pattern, force: 0
        self.batch_remove: Callable[..., list[int]] = lambda keys, force: [0] * len(keys)
        self.close: Callable[[], int] = lambda: 0


@contextmanager
def opened_stand_in(
    directory: Path, monkeypatch: pytest.MonkeyPatch, **extra: Any
) -> Iterator[tuple[StandIn, StorageBackend]]:
    """A backend over a stand-in for Mooncake's store."""
    stand_in = StandIn()
    monkeypatch.setattr(mooncake_store, "_store_class", lambda interface: lambda: stand_in)
    with socket.create_server(("127.0.0.1", 0)) as master:
        url = f"127.0.0.1:{master.getsockname()[1]}"
        config = StorageConfig(backend="mooncake", path=directory, url=url, extra=extra)
        with closing(open_storage(config)) as backend:
            yield stand_in, backend


def test_an_object_that_is_not_removed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened_stand_in(tmp_path, monkeypatch, timeout_s=0.05) as (stand_in, backend):
        for code, is_gone in {0: True, -704: True, -900: False}.items():
            stand_in.batch_remove = lambda keys, force, code=code: [code]
            assert backend.remove(keys(1)) == [is_gone]
        stuck = threading.Event()
        stand_in.batch_remove = lambda keys, force: stuck.wait()
        assert backend.remove(keys(1)) == [False]
        stuck.set()


def test_a_clear_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened_stand_in(tmp_path, monkeypatch, timeout_s=0.05) as (stand_in, backend):
        stand_in.remove_by_regex = lambda pattern, force: 3
        assert backend.clear() == (3, 0)
        stand_in.remove_by_regex = lambda pattern, force: -900
        with pytest.raises(OSError, match="-900"):
            backend.clear()
        stuck = threading.Event()
        stand_in.remove_by_regex = lambda pattern, force: stuck.wait()
        with pytest.raises(TimeoutError):
            backend.clear()
        stuck.set()


def buffers(backend: StorageBackend) -> list[queue.SimpleQueue[memoryview]]:
    """Those that no call uses: of seals, and of gets over TCP."""
    assert isinstance(backend, SealedStorage)
    assert isinstance(backend._store, MooncakeStore)
    return [backend._store._seals, backend._store._staging]


@pytest.mark.parametrize("protocol", ["tcp", "rdma"])
@pytest.mark.parametrize(
    ("error", "cause"), [(RuntimeError("broken"), "io_error"), (TimeoutError("its own"), "timeout")]
)
def test_calls_that_raise_give_their_buffers_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str, error: Exception, cause: str
) -> None:
    def fail(*_: object) -> list[int]:
        raise error

    arena = Arena(1)
    with opened_stand_in(tmp_path, monkeypatch, protocol=protocol) as (stand_in, backend):
        for call in ("batch_get_into", "batch_get_into_multi_buffers", "batch_put_from_multi_buffers"):
            monkeypatch.setattr(stand_in, call, fail)
        assert backend.get(keys(1), arena.read) == [False]
        assert backend.set(keys(1), arena.pages) == [False]
        assert backend.stats().refused == {cause: 2}
        assert [idle.qsize() for idle in buffers(backend)] == [8, 8]


def test_a_call_that_was_given_up_keeps_its_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena, ended = Arena(1), threading.Event()
    with opened_stand_in(tmp_path, monkeypatch, timeout_s=0.05) as (stand_in, backend):
        stand_in.batch_get_into = stand_in.batch_put_from_multi_buffers = lambda *_: [ended.wait()]
        assert backend.get(keys(1), arena.read) == [False]
        assert backend.set(keys(1), arena.pages) == [False]
        assert backend.stats().refused == {"timeout": 2}
        assert [idle.qsize() for idle in buffers(backend)] == [7, 7]
        ended.set()


def test_no_batch_is_begun_after_a_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena, ended, asked = Arena(48), threading.Event(), list[str]()

    def hang(keys: list[str], *_: object) -> list[int]:
        asked.extend(keys)
        ended.wait()
        return []

    of_one_get = 1 << 16  # 15 blobs
    extra = {"timeout_s": 0.05, "staging_bytes": of_one_get}
    with opened_stand_in(tmp_path, monkeypatch, **extra) as (stand_in, backend):
        stand_in.batch_get_into = hang
        assert backend.get(keys(48), arena.read) == [False] * 48
        assert backend.stats().refused == {"timeout": 48}
        assert len(asked) == 15
        ended.set()


@pytest.mark.parametrize("protocol", ["tcp", "rdma"])
def test_nobody_waits_for_ever_for_a_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    arena = Arena(1)
    with opened_stand_in(tmp_path, monkeypatch, protocol=protocol, timeout_s=0.05) as (_, backend):
        for idle in buffers(backend):
            while not idle.empty():
                idle.get()
        assert backend.get(keys(1), arena.read) == [False]
        assert backend.set(keys(1), arena.pages) == [False]
        assert backend.stats().refused == {"timeout": 2}


@pytest.mark.slow
def test_pages_of_another_process_are_hits_until_it_dies(master: MooncakeMaster, tmp_path: Path) -> None:
    arena = Arena(20, PAGE)
    with opened(master, tmp_path) as backend, owner(master, tmp_path) as other:
        backend.register([arena.memory])
        assert backend.exists(keys(20)) == [True] * 20
        assert backend.get(keys(20), arena.read) == [True] * 20
        assert [bytes(page) for page in arena.read] == [bytes(page) for page in arena.pages]
        other.kill()
        other.wait(30)
        assert backend.get(keys(20), arena.read) == [False] * 20
        assert backend.stats().hits == 20
        assert set(backend.stats().refused) <= {"io_error"}
        assert backend.exists(keys(20)) == [False] * 20  # so they can be stored again
        with opened(master, tmp_path, lent=64 << 20) as lender:
            deadline = time.monotonic() + 30
            while not all(lender.set(keys(20), arena.pages)):  # until the master knows who died
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert backend.get(keys(20), arena.read) == [True] * 20


@pytest.mark.slow
def test_an_owner_that_stands_still_is_a_miss_in_bounded_time(master: MooncakeMaster, tmp_path: Path) -> None:
    arena = Arena(20, PAGE)
    with opened(master, tmp_path) as backend, owner(master, tmp_path) as other:
        other.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        assert backend.get(keys(20), arena.read) == [False] * 20
        assert time.monotonic() - began < 60
        assert set(backend.stats().refused) <= {"timeout", "io_error"}
        other.send_signal(signal.SIGCONT)


@pytest.mark.slow
def test_a_dead_master_is_a_miss(master: MooncakeMaster, tmp_path: Path) -> None:
    arena = Arena(2, PAGE)
    with opened(master, tmp_path, lent=64 << 20) as backend:
        assert backend.set(keys(2), arena.pages) == [True, True]
        master.process.kill()
        master.process.wait(30)
        assert backend.exists(keys(2)) == [False, False]
        assert backend.get(keys(2), arena.read) == [False, False]
        assert backend.set(keys(2), arena.pages) == [False, False]
        assert backend.stats().refused == {"io_error": 4}


@pytest.mark.slow
def test_a_full_store_is_a_miss(master: MooncakeMaster, tmp_path: Path) -> None:
    arena = Arena(100, PAGE)
    with opened(master, tmp_path, lent=16 << 20) as backend:
        stored = backend.set(keys(100), arena.pages)
        assert not all(stored)
        assert backend.stats().refused == {"full": stored.count(False)}


def test_what_cannot_work_is_refused_by_name(tmp_path: Path) -> None:
    why = MooncakeMaster.why_not()
    if why:
        pytest.skip(why)
    for url, says in {"": "no HOST:PORT", f"127.0.0.1:{free_port()}": "start mooncake_master"}.items():
        with pytest.raises(ConfigError, match=says):
            open_storage(StorageConfig(backend="mooncake", path=tmp_path, url=url))
    with pytest.raises(ConfigError, match="too few to lend"):
        open_storage(StorageConfig(backend="mooncake", path=tmp_path, url="a:1", max_bytes=(16 << 20) - 1))
    with pytest.raises(ConfigError, match="colour"):
        open_storage(StorageConfig(backend="mooncake", path=tmp_path, url="a:1", extra={"colour": 1}))
