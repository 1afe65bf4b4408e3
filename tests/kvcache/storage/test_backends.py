"""What every backend does, whatever keeps its blobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import ConfigError
from kvcache.storage.backend import StorageBackend
from kvcache.storage.config import StorageConfig
from kvcache.storage.factory import open_storage
from kvcache.storage.keys import visibility
from tests.kvcache.storage.support import Arena, MooncakeMaster, S3Server, keys

PAGES = 8
BACKENDS = ("file", "file with fsync", "file with direct_io", "dynamic", "s3")


@pytest.fixture
def arena() -> Arena:
    return Arena(PAGES)


@pytest.fixture(
    params=[
        *BACKENDS,
        pytest.param("mooncake", marks=pytest.mark.slow),
        pytest.param("nixl", marks=pytest.mark.peers),
    ]
)
def backend(request: pytest.FixtureRequest, tmp_path: Path, arena: Arena) -> Iterator[StorageBackend]:
    kind = str(request.param)
    if kind == "mooncake":
        master: MooncakeMaster = request.getfixturevalue("mooncake_master")
        config = StorageConfig(backend="mooncake", path=tmp_path, url=master.url, max_bytes=64 << 20)
    elif kind == "s3":
        server: S3Server = request.getfixturevalue("s3_server")
        config = server.config(tmp_path, tmp_path.name)
    elif kind == "dynamic":
        config = StorageConfig(backend="tests.kvcache.storage.support:MemoryStore", path=tmp_path)
    else:
        if kind == "nixl":
            pytest.importorskip("nixl", reason="nixl is not installed (nixl-cu12 and nixl, with --no-deps)")
        config = StorageConfig(
            backend=kind.split()[0], path=tmp_path, fsync="fsync" in kind, direct_io="direct_io" in kind
        )
    opened = open_storage(config)
    opened.register([arena.memory])
    yield opened
    opened.close()


def test_what_was_stored_comes_back(backend: StorageBackend, arena: Arena) -> None:
    names = keys(PAGES)
    assert backend.exists(names) == [False] * PAGES
    assert backend.get(names, arena.read) == [False] * PAGES
    assert backend.set(names, arena.pages) == [True] * PAGES
    assert backend.exists(names) == [True] * PAGES
    assert backend.get(names, arena.read) == [True] * PAGES
    assert [bytes(page) for page in arena.read] == [bytes(page) for page in arena.pages]
    stats = backend.stats()
    assert (stats.hits, stats.misses, stats.written, stats.refused) == (PAGES, PAGES, PAGES, {})


def test_a_batch_may_hit_in_part(backend: StorageBackend, arena: Arena) -> None:
    names = keys(PAGES)
    assert backend.set(names[::2], arena.pages[::2]) == [True] * (PAGES // 2)
    hit = [index % 2 == 0 for index in range(PAGES)]
    assert backend.exists(names) == hit
    assert backend.get(names, arena.read) == hit
    assert [bytes(page) for page in arena.read[::2]] == [bytes(page) for page in arena.pages[::2]]


def test_what_is_there_is_kept(backend: StorageBackend, arena: Arena) -> None:
    name = keys(1)
    assert backend.set(name, arena.pages[:1]) == [True]
    assert backend.set(name, arena.pages[1:2]) == [True]
    assert backend.get(name, arena.read[:1]) == [True]
    assert arena.read[0] == arena.pages[0]
    assert backend.stats().written == 1


def test_a_page_of_another_size_is_a_miss(backend: StorageBackend, arena: Arena) -> None:
    names = keys(2)
    assert backend.set(names, arena.pages[:2]) == [True] * 2
    shorter, longer = arena.read[0][:2048], arena.memory[-8192:]
    assert backend.get(names, [shorter, longer]) == [False, False]
    assert sum(backend.stats().refused.values()) == 2


def test_a_tenant_is_forgotten_and_then_all(backend: StorageBackend, arena: Arena) -> None:
    alice, bob, public = keys(2, tenant="alice"), keys(2, tenant="bob"), keys(2)
    assert backend.set([*alice, *bob, *public], arena.pages[:6]) == [True] * 6
    removed = backend.clear(visibility("alice"))
    assert removed is not None
    assert removed.blobs == 2
    assert backend.exists([*alice, *bob, *public]) == [False] * 2 + [True] * 4
    backend.clear()
    assert backend.exists([*bob, *public]) == [False] * 4
    assert backend.set(alice, arena.pages[:2]) == [True] * 2


def test_single_blobs_are_removed(backend: StorageBackend, arena: Arena) -> None:
    names = keys(4)
    assert backend.set(names, arena.pages[:4]) == [True] * 4
    assert backend.remove([names[1], names[3], *keys(1, tenant="nobody")]) == [True] * 3
    assert backend.exists(names) == [True, False, True, False]
    assert backend.set(names[1:2], arena.pages[1:2]) == [True], "it can be stored again"


def test_an_empty_batch(backend: StorageBackend) -> None:
    assert (backend.exists([]), backend.get([], []), backend.set([], [])) == ([], [], [])


def test_a_backend_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    for name, says in {
        "tape": "use one of file",
        "tests.kvcache.storage.support:Nothing": "name a class",
        "pathlib:Path": "no BlobStore",
    }.items():
        with pytest.raises(ConfigError, match=says):
            open_storage(StorageConfig(backend=name, path=tmp_path))
    with pytest.raises(ConfigError, match="needs a directory"):
        open_storage(StorageConfig(backend="file"))
    with pytest.raises(ConfigError, match="knows no colour"):
        open_storage(StorageConfig(backend="file", path=tmp_path, extra={"colour": 1}))
    with pytest.raises(ConfigError, match=r"^hicache_storage_backend_extra_config.colour: unknown key"):
        open_storage(StorageConfig(backend="nixl", path=tmp_path, extra={"colour": 1}))
