"""NIXL's POSIX plug-in, where NIXL is installed."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from kvcache.storage.config import StorageConfig
from kvcache.storage.factory import open_storage
from tests.kvcache.storage.support import Arena, keys, open_files

pytestmark = pytest.mark.peers


@pytest.fixture(autouse=True)
def nixl() -> None:
    pytest.importorskip("nixl", reason="nixl is not installed (nixl-cu12 and nixl, both with --no-deps)")


def test_files_are_those_of_the_file_backend(tmp_path: Path) -> None:
    arena, names = Arena(4, 1 << 20), keys(4)
    with closing(open_storage(StorageConfig(backend="nixl", path=tmp_path))) as backend:
        backend.register([arena.memory])
        assert backend.set(names[:2], arena.pages[:2]) == [True, True]
        assert open_files(tmp_path).set(names[2:], arena.pages[2:]) == [True, True]
        assert backend.get(names, arena.read) == [True] * 4
        assert [bytes(page) for page in arena.read] == [bytes(page) for page in arena.pages]
        arena.wipe()
        assert open_files(tmp_path).get(names, arena.read) == [True] * 4
        assert [bytes(page) for page in arena.read] == [bytes(page) for page in arena.pages]


def test_memory_that_is_not_registered_is_a_miss(tmp_path: Path) -> None:
    arena = Arena(1)
    with closing(open_storage(StorageConfig(backend="nixl", path=tmp_path))) as backend:
        assert backend.set(keys(1), arena.pages) == [False]
        assert backend.stats().refused == {"io_error": 1}
