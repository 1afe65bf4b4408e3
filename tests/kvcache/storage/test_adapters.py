"""Adapters to other projects' stores, each where its package is installed; stand-ins for 3FS and for NIXL."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from common.errors import ConfigError
from kvcache.storage import aibrix_store, lmcache_store, nixl_files
from kvcache.storage.backend import StorageBackend
from kvcache.storage.blob_store import Outcome, SealedBlob
from kvcache.storage.config import StorageConfig
from kvcache.storage.daemon_threads import DaemonThreads
from kvcache.storage.factory import open_storage
from kvcache.storage.file_store import FileStore
from kvcache.storage.nixl_files import NixlFiles, NixlOptions
from kvcache.storage.seal import SEAL_BYTES
from tests.kvcache.storage.support import Arena, free_port, keys, listens


def check(backend: StorageBackend, config: StorageConfig) -> None:
    """Pages come back, to this process and to another backend; one of another size is a miss."""
    arena, names = Arena(4, 1 << 16), keys(4)
    backend.register([arena.memory])
    assert backend.get(names, arena.read) == [False] * 4
    assert backend.set(names[:3], arena.pages[:3]) == [True] * 3
    with closing(open_storage(config)) as other:
        deadline = time.monotonic() + 10
        while not all(other.exists(names[:3])):  # LMCache says nothing when it has stored a page
            assert time.monotonic() < deadline
        assert other.exists(names) == [True] * 3 + [False]
        assert other.get(names, arena.read) == [True] * 3 + [False]
        assert [bytes(page) for page in arena.read[:3]] == [bytes(page) for page in arena.pages[:3]]
        assert other.get(names[:1], [arena.read[0][:100]]) == [False]
        assert sum(other.stats().refused.values()) == 1


# -- LMCache ---------------------------------------------------------------------------------------


@pytest.fixture
def lmcache_server(tmp_path: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings(action="ignore"):
            from lmcache.v1.server import __main__  # noqa: F401
    except ImportError as error:
        pytest.skip(f"lmcache is not installed: {error}")
    port = free_port()
    with (tmp_path / "server.log").open("wb") as log_file:
        process = subprocess.Popen(
            [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port), "cpu"],
            stdout=log_file,
            stderr=subprocess.STDOUT,
        )
        deadline = time.monotonic() + 60
        while not listens(port):
            assert process.poll() is None, (tmp_path / "server.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield f"lm://127.0.0.1:{port}"
        process.kill()
        process.wait(30)


@pytest.mark.peers
def test_lmcache(lmcache_server: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = StorageConfig(backend="lmcache", path=tmp_path, url=lmcache_server)
    with closing(open_storage(config)) as backend:
        check(backend, config)
        with caplog.at_level(logging.WARNING):
            backend.clear()
        assert "restart it" in caplog.text


@pytest.mark.peers
def test_a_bad_page_of_lmcache_can_be_stored_again(lmcache_server: str, tmp_path: Path) -> None:
    arena = Arena(1)
    config = StorageConfig(backend="lmcache", path=tmp_path, url=lmcache_server)
    with closing(open_storage(config)) as backend:
        assert backend.set(keys(1), arena.pages) == [True]
        assert backend.get(keys(1), [arena.read[0][:100]]) == [False]  # as if it were another page
        assert backend.exists(keys(1)) == [False]
        assert backend.set(keys(1), arena.pages) == [True]
        assert backend.get(keys(1), arena.read) == [True]
        assert backend.stats().written == 2


def test_a_silent_lmcache_takes_one_timeout_of_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = SimpleNamespace(serialize=lambda: b"a question")
    protocol = SimpleNamespace(
        ClientMetaMessage=lambda *_: message,
        ClientCommand={"EXIST": 1, "GET": 2},
        MemoryFormat=SimpleNamespace(BINARY=1),
        ServerMetaMessage=SimpleNamespace(packlength=lambda: 8),
    )
    monkeypatch.setattr(lmcache_store, "_protocol", lambda: (protocol, lambda *_: "a key"))
    arena = Arena(4)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"lm://127.0.0.1:{silent.getsockname()[1]}"
        config = StorageConfig(backend="lmcache", path=tmp_path, url=url, extra={"timeout_s": 0.05})
        with closing(open_storage(config)) as backend:
            assert backend.get(keys(4), arena.read) == [False] * 4
            assert backend.exists(keys(4)) == [False] * 4
            assert backend.stats().refused == {"timeout": 4}
        silent.setblocking(False)
        for _ in range(2):  # a connection is made anew after a timeout
            silent.accept()[0].close()
        with pytest.raises(BlockingIOError):
            silent.accept()


# -- AIBrix ----------------------------------------------------------------------------------------


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # in its connector
def test_aibrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIBRIX_KV_CACHE_OL_SHFS_ROOT", str(tmp_path / "shared"))
    try:
        import aibrix_kvcache.l2.connectors  # noqa: F401
    except ImportError as error:
        pytest.skip(f"aibrix-kvcache is not installed: {error}")
    config = StorageConfig(backend="aibrix", path=tmp_path, extra={"connector": "SHFS"})
    with closing(open_storage(config)) as backend:
        check(backend, config)
    with pytest.raises(ConfigError, match="connector"):
        open_storage(StorageConfig(backend="aibrix", path=tmp_path, extra={"connector": "TAPE"}))


def test_a_stuck_connector_takes_one_timeout_of_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    waited: list[float] = []

    async def hang(*_: object) -> None:
        await asyncio.get_running_loop().create_future()

    def start(call: Any, loop: asyncio.AbstractEventLoop) -> Any:
        future = started(call, loop)

        def result(seconds: float) -> Any:
            waited.append(seconds)
            return future.result(seconds)

        return SimpleNamespace(result=result, cancel=future.cancel)

    opened = SimpleNamespace(is_ok=lambda: True)
    connector = SimpleNamespace(open=lambda: opened, close=lambda: None, get=hang, exists=hang)
    kinds = SimpleNamespace(
        ConnectorConfig=lambda *arguments: given.extend(arguments),
        Connector=SimpleNamespace(create=lambda _: connector),
    )
    monkeypatch.setattr(aibrix_store, "_package", lambda: (kinds, lambda *_: None))
    started = asyncio.run_coroutine_threadsafe
    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", start)
    arena, extra = Arena(4), {"connector": "STUCK", "timeout_s": 0.05}
    with closing(open_storage(StorageConfig(backend="aibrix", path=tmp_path, extra=extra))) as backend:
        assert backend.get(keys(4), arena.read) == [False] * 4
        assert backend.exists(keys(4)) == [False] * 4
        assert backend.stats().refused == {"timeout": 4}
    assert waited == [0.05, 0.0, 0.0, 0.0] * 2
    assert isinstance(given[-1], DaemonThreads), "its threads would keep the process"


# -- 3FS -------------------------------------------------------------------------------------------


class Ring:
    """hf3fs_fuse.io's ring, over an ordinary file system."""

    def __init__(self) -> None:
        self.prepared: list[tuple[memoryview, bool, int, int]] = []

    def prepare(self, region: memoryview, is_reading: bool, descriptor: int, offset: int) -> None:
        self.prepared.append((region, is_reading, descriptor, offset))

    def submit(self) -> Ring:
        return self

    def wait(self, min_results: int, timeout: object) -> list[Any]:
        done = []
        for region, is_reading, descriptor, offset in self.prepared[:min_results]:
            move = os.preadv if is_reading else os.pwritev
            done.append(SimpleNamespace(result=move(descriptor, [region], offset)))
        self.prepared.clear()
        return done


@pytest.fixture
def usrbio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """A stand-in for hf3fs_fuse.io."""
    module: Any = ModuleType("hf3fs_fuse.io")
    package: Any = ModuleType("hf3fs_fuse")
    package.io = module

    def make_iovec(memory: SharedMemory, mount: str) -> memoryview:
        return memory.buf

    module.make_iovec = make_iovec
    module.make_ioring = lambda mount, entries, for_read, timeout, numa: Ring()
    module.register_fd = module.deregister_fd = lambda descriptor: None
    module.extract_mount_point = lambda path: path if path.startswith(str(tmp_path)) else None
    monkeypatch.setitem(sys.modules, "hf3fs_fuse", package)
    monkeypatch.setitem(sys.modules, "hf3fs_fuse.io", module)
    return package


def test_hf3fs_with_a_stand_in(usrbio: ModuleType, tmp_path: Path) -> None:
    config = StorageConfig(backend="hf3fs", path=tmp_path)
    with closing(open_storage(config)) as backend:
        check(backend, config)
    with pytest.raises(ConfigError, match="not on a 3FS"):
        open_storage(StorageConfig(backend="hf3fs", path=Path("/elsewhere")))


def test_a_ring_that_does_not_answer_is_not_used_again(
    usrbio: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena(2)
    with closing(open_storage(StorageConfig(backend="hf3fs", path=tmp_path))) as backend:
        assert backend.set(keys(2), arena.pages) == [True, True]
        monkeypatch.setattr(Ring, "wait", lambda self, min_results, timeout: [])
        assert backend.get(keys(2), arena.read) == [False, False]
        assert backend.stats().refused == {"timeout": 1, "io_error": 1}


# -- NIXL ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["register_memory", "initialize_xfer", "deregister_memory"])
def test_a_call_of_nixl_that_raises_keeps_no_seal_and_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    agent = SimpleNamespace(
        register_memory=lambda places, kind: kind,
        deregister_memory=lambda registered: None,
        get_xfer_descs=lambda places, kind: places,
        initialize_xfer=lambda *_: 1,
        transfer=lambda handle: "DONE",
        release_xfer_handle=lambda handle: None,
    )
    monkeypatch.setattr(nixl_files, "_agent", lambda name, options: agent)
    files = NixlFiles(NixlOptions(), fsync=False)
    blob = SealedBlob(memoryview(bytearray(4096)), memoryview(bytearray(SEAL_BYTES)))
    with closing(FileStore(tmp_path, 0, files)) as store:
        with monkeypatch.context() as broken:
            broken.setattr(agent, call, lambda *_: 1 // 0)
            assert store.write(keys(1), [blob]) == [Outcome.IO_ERROR]
        assert store.held().nbytes == 0
        assert files._seals.qsize() == 64


# -- what is not installed -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "package", "given"),
    [
        ("lmcache", "lmcache", {"url": "lm://127.0.0.1:1"}),
        ("aibrix", "aibrix_kvcache", {"extra": {"connector": "SHFS"}}),
        ("hf3fs", "hf3fs_fuse", {}),
        ("nixl", "nixl", {}),
        ("s3", "boto3", {"url": "s3://pages/"}),
        ("mooncake", "mooncake", {"url": "127.0.0.1:1"}),
    ],
)
def test_a_package_that_is_missing_is_named(
    backend: str, package: str, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [one for one in sys.modules if one.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        open_storage(StorageConfig(backend=backend, path=tmp_path, **given))
