"""Copies in `model_cache` that nobody uses are deleted, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster import model_cache
from cluster.model_cache import ModelCache
from cluster.model_files import MODEL_FILES
from cluster.weights import local_copy

ROOT = Path(__file__).parents[2]
DAY_S = 86400.0
OLD_S = 8 * DAY_S
USE = """
import sys
from pathlib import Path
from cluster.model_files import MODEL_FILES
from cluster.weights import copy_files, local_copy

def slowly(files, source, to):
    copy_files(files[:1], source, to)
    print("copying", flush=True)
    sys.stdin.readline()
    copy_files(files[1:], source, to)

print(local_copy(Path(sys.argv[1]), Path(sys.argv[2]), MODEL_FILES, copy=slowly), flush=True)
sys.stdin.read()
"""
CHURN = """
import sys
from pathlib import Path
from cluster.model_cache import ModelCache
from cluster.model_files import MODEL_FILES
from cluster.weights import local_copy

cache = ModelCache(Path(sys.argv[2]), 1e-9)
for _ in range(int(sys.argv[3])):
    copied = local_copy(Path(sys.argv[1]), cache.directory, MODEL_FILES)
    cache.remove_unused()
    assert len(list(copied.iterdir())) == 2
"""


def checkpoint(directory: Path, name: str) -> Path:
    source = directory / "shared" / name
    source.mkdir(parents=True)
    (source / "config.json").write_text("{}")
    (source / "model.safetensors").write_text(name)
    return source


def aged(cache: Path) -> None:
    """As if all there had been used last, and written, OLD_S ago."""
    for path in [*cache.iterdir(), *(cache / ".locks").iterdir()]:
        about = path.stat()
        os.utime(path, (about.st_atime - OLD_S, about.st_mtime - OLD_S))


def names(cache: Path) -> set[str]:
    return {path.name.partition("-")[0] for path in cache.iterdir()} - {".locks"}


@contextmanager
def another_process(source: Path, cache: Path) -> Iterator[subprocess.Popen[str]]:
    """One that copies a checkpoint, and says so when it has half of it."""
    command = [sys.executable, "-c", USE, str(source), str(cache)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "copying\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20.0)


def ends_copying(process: subprocess.Popen[str]) -> Path:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return Path(process.stdout.readline().strip())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelCache]:
    """Copies in it are used by this process until `nobody_uses`, or the test, ends."""
    monkeypatch.setattr(model_cache, "_held", {})
    yield ModelCache(tmp_path / "cache", 7.0)
    nobody_uses()


def nobody_uses() -> None:
    """As the end of this process."""
    for descriptor in model_cache._held.values():
        os.close(descriptor)
    model_cache._held.clear()


def test_what_nobody_has_used_for_a_week_is_deleted(cache: ModelCache, tmp_path: Path) -> None:
    for name in ("a", "b"):
        local_copy(checkpoint(tmp_path, name), cache.directory, MODEL_FILES)
    nobody_uses()
    cache.remove_unused()
    assert names(cache.directory) == {"a", "b"}, "they are new"
    aged(cache.directory)
    local_copy(tmp_path / "shared" / "b", cache.directory, MODEL_FILES)
    nobody_uses()
    cache.remove_unused()
    assert names(cache.directory) == {"b"}, "b has been used since"
    again = local_copy(tmp_path / "shared" / "a", cache.directory, MODEL_FILES)
    assert (again / "model.safetensors").read_text() == "a"


def test_what_a_process_uses_stays_and_is_new_when_it_has_ended(cache: ModelCache, tmp_path: Path) -> None:
    with another_process(checkpoint(tmp_path, "a"), cache.directory) as process:
        copied = ends_copying(process)
        aged(cache.directory)
        cache.remove_unused()
        assert copied.is_dir()
    cache.remove_unused()
    assert copied.is_dir(), "it was seen in use a moment ago"
    aged(cache.directory)
    cache.remove_unused()
    assert not copied.exists()


def test_what_is_being_copied_stays(cache: ModelCache, tmp_path: Path) -> None:
    with another_process(checkpoint(tmp_path, "a"), cache.directory) as process:
        aged(cache.directory)
        cache.remove_unused()
        assert (ends_copying(process) / "model.safetensors").read_text() == "a"


def test_half_a_copy_of_a_process_that_was_killed_is_deleted(cache: ModelCache, tmp_path: Path) -> None:
    with another_process(checkpoint(tmp_path, "a"), cache.directory):
        pass
    cache.remove_unused()
    assert names(cache.directory) == {".a"}, "the next process goes on with it"
    aged(cache.directory)
    cache.remove_unused()
    assert names(cache.directory) == set()


def test_a_deletion_that_was_cut_short_is_ended(cache: ModelCache, tmp_path: Path) -> None:
    copied = local_copy(checkpoint(tmp_path, "a"), cache.directory, MODEL_FILES)
    nobody_uses()
    copied.rename(copied.with_name(f".{copied.name}.removed"))
    cache.remove_unused()
    assert names(cache.directory) == set()


def test_what_is_not_a_copy_stays(cache: ModelCache) -> None:
    for name in (".locks", "theirs", ".theirs.partial"):
        (cache.directory / name).mkdir(parents=True)
    (cache.directory / "file").touch()
    aged(cache.directory)
    cache.remove_unused()
    assert names(cache.directory) == {"theirs", ".theirs.partial", "file"}


def test_a_cache_that_is_not_there_ends_no_worker(
    cache: ModelCache, caplog: pytest.LogCaptureFixture
) -> None:
    cache.remove_unused()
    assert "are not deleted" in caplog.text


def test_no_process_finds_a_copy_that_another_deletes(cache: ModelCache, tmp_path: Path) -> None:
    """Everyone deletes at once what is not in use. A process uses each copy until it ends, so several
    short ones take turns."""
    sources = [checkpoint(tmp_path, name) for name in ("a", "b")]
    for _ in range(2):
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", CHURN, str(source), str(cache.directory), "20"],
                stderr=subprocess.PIPE, text=True, cwd=ROOT,
            )
            for source in sources * 2
        ]  # fmt: skip
        said = [process.communicate(timeout=60.0)[1] for process in processes]
        assert [process.returncode for process in processes] == [0] * 4, said
    assert len(names(cache.directory)) <= 2
