"""Seals: what was changed, moved to another key or sealed with another secret is a miss, and is counted."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from common.secrets import ClusterSecret, open_secret
from kvcache.storage.blob_store import Outcome
from kvcache.storage.seal import SEAL_BYTES, Sealer, seal_holds, write_seal
from kvcache.storage.sealed import SealedStorage
from kvcache.storage.secret import SealSecret, key_in
from tests.kvcache.storage.support import Arena, MemoryStore, keys

SECRET = b"k" * 32


@given(st.binary(min_size=1, max_size=200), st.integers(min_value=0), st.binary(min_size=48, max_size=48))
def test_any_flipped_bit_and_any_other_key_break_the_seal(page: bytes, bit: int, other: bytes) -> None:
    place = Sealer(SECRET).locate(keys(1)[0])
    blob = bytearray(page) + bytes(SEAL_BYTES)
    view = memoryview(blob)
    data, seal = view[: len(page)], view[len(page) :]
    write_seal(place, data, seal)
    assert seal_holds(place, data, seal)
    assert not seal_holds(Sealer(SECRET).locate(other), data, seal)
    assert not seal_holds(Sealer(b"x" * 32).locate(keys(1)[0]), data, seal)
    bit %= 8 * len(blob)
    view[bit // 8] ^= 1 << bit % 8
    assert not seal_holds(place, data, seal)


def test_names_tell_nothing_without_the_secret() -> None:
    one, other = Sealer(SECRET).locate(keys(1)[0]), Sealer(b"x" * 32).locate(keys(1)[0])
    assert one.name[:16] == other.name[:16] == keys(1)[0][:16]
    assert one.name[16:] != other.name[16:]
    assert keys(1)[0][16:] not in one.name


def test_a_bad_blob_is_counted_once_and_can_be_stored_again() -> None:
    store, arena = MemoryStore(), Arena(3)
    backend = SealedStorage(store, SealSecret(None, SECRET))
    assert backend.set(keys(3), arena.pages) == [True] * 3
    name, blob = next(iter(store.blobs.items()))
    store.blobs[name] = blob[:-1] + bytes([blob[-1] ^ 1])
    assert backend.get(keys(3), arena.read) == [False, True, True]
    assert backend.stats().refused == {"corrupt": 1}
    assert backend.exists(keys(3)) == [False, True, True]
    assert backend.set(keys(3), arena.pages) == [True] * 3
    assert backend.get(keys(3), arena.read) == [True] * 3
    stats = backend.stats()
    assert (stats.hits, stats.misses, stats.written) == (5, 1, 4)
    assert (stats.read_bytes, stats.written_bytes) == (5 * 4096, 4 * 4096)
    assert stats.read_seconds > 0 < stats.write_seconds
    store.blobs.clear()
    assert backend.last_stats() == stats, "the store is not asked"
    assert backend.stats().blobs == 0


@pytest.mark.parametrize("cause", [Outcome.IO_ERROR, Outcome.FULL, Outcome.READ_ONLY, Outcome.TIMEOUT])
def test_failures_are_misses_with_a_cause(cause: Outcome) -> None:
    store, arena = MemoryStore(), Arena(2)
    backend = SealedStorage(store, SealSecret(None, SECRET))
    store.fails = lambda verb: cause
    assert backend.set(keys(2), arena.pages) == [False, False]
    store.fails = lambda verb: None
    assert backend.set(keys(2), arena.pages) == [True, True]
    store.fails = lambda verb: cause
    assert backend.get(keys(2), arena.read) == [False, False]
    assert backend.stats().refused == {cause.value: 4}


class RaisingStore(MemoryStore):
    """Anybody's: while it is broken, it breaks the rule that a store raises nothing."""

    broken = False

    def __getattribute__(self, name: str) -> Any:
        if name in ("exists", "read", "write", "discard", "held") and self.broken:
            return _raise
        return super().__getattribute__(name)


def _raise(*_: object) -> None:
    raise OSError("nobody caught it")


def test_a_store_that_raises_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    store, arena = RaisingStore(), Arena(3)
    backend = SealedStorage(store, SealSecret(None, SECRET))
    assert backend.set(keys(1), arena.pages[:1]) == [True]
    store.broken = True
    assert backend.exists(keys(3)) == [False] * 3
    assert backend.get(keys(3), arena.read) == [False] * 3
    assert backend.set(keys(3), arena.pages) == [False] * 3
    assert backend.remove(keys(3)) == [False] * 3
    assert backend.stats().refused == {"io_error": 6}
    assert backend.stats().blobs == 0, "it does not say"
    assert "nobody caught it" in caplog.text
    store.broken = False
    assert backend.get(keys(1), arena.read[:1]) == [True]
    assert backend.stats().blobs == 1


def test_rotation_is_a_miss_and_never_a_refusal(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"0123456789abcdefghijklmnopqrstuv\n")
    path.chmod(0o600)
    secret = open_secret(path)
    assert isinstance(secret, ClusterSecret)
    store, arena = MemoryStore(), Arena(2)
    backend = SealedStorage(store, SealSecret(secret))
    assert backend.set(keys(2), arena.pages) == [True, True]
    secret.accepted = (b"another-secret-of-32-characters!", *secret.accepted)
    assert backend.exists(keys(2)) == [False, False]
    assert backend.get(keys(2), arena.read) == [False, False]
    assert backend.stats().refused == {}
    assert backend.set(keys(2), arena.pages) == [True, True]
    assert backend.get(keys(2), arena.read) == [True, True]
    assert [bytes(page) for page in arena.read] == [bytes(page) for page in arena.pages]


def test_a_key_file_is_made_once_by_all_who_race_for_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "baton.key"
    found: list[bytes] = []
    start = threading.Barrier(8)

    def race() -> None:
        start.wait()
        found.append(key_in(path))

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert len(found[0]) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["baton.key"]


def test_a_key_that_others_may_read_or_that_was_cut_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "baton.key"
    key_in(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        key_in(path)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="no key of 32 bytes"):
        key_in(path)
