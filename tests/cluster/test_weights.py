"""Weights come to a host once: with processes that start together, and with one that is killed meanwhile."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from cluster.host_lock import once_per_host
from cluster.model_files import MODEL_FILES, model_directory
from cluster.weights import copy_files, local_copy
from common.errors import ConfigError

WEIGHTS = "model.safetensors"
PROCESSES = multiprocessing.get_context("spawn")
BOUND_S = 60.0


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    source = tmp_path / "shared" / "m"
    source.mkdir(parents=True)
    (source / "config.json").write_text("{}")
    (source / WEIGHTS).write_bytes(os.urandom(1 << 16))
    (source / "README.md").write_text("not copied")
    return source


def note(log: Path) -> None:
    """Add a line. Lines of several processes do not mix."""
    with log.open("a") as file:
        file.write(f"{os.getpid()}\n")


def pull(source: Path, cache: Path, log: Path, told: Connection) -> None:
    """A replica: say ready, wait for the others, get the weights, tell which file they are in."""

    def counted(files: list[Path], of: Path, to: Path) -> None:
        note(log)
        copy_files(files, of, to)

    told.send("ready")
    told.recv()
    copied = local_copy(source, cache, MODEL_FILES, copy=counted)
    about = (copied / WEIGHTS).stat()
    told.send((str(copied), about.st_ino, about.st_size))


def pull_and_stop(source: Path, cache: Path, told: Connection) -> None:
    """A replica that has half of the weights when it is killed."""

    def half(files: list[Path], of: Path, to: Path) -> None:
        (to / WEIGHTS).write_bytes((of / WEIGHTS).read_bytes()[:100])
        told.send("half")
        told.recv()

    local_copy(source, cache, MODEL_FILES, copy=half)


def hear(connection: Connection) -> object:
    assert connection.poll(BOUND_S), "nothing came"
    return connection.recv()


def fetch(model: str, files: tuple[str, ...]) -> str:
    """As Hugging Face's: what is there is not downloaded again."""
    directory = Path(os.environ["HUB"])
    if not (directory / WEIGHTS).exists():
        note(directory / "log")
        part = directory / f"{WEIGHTS}.incomplete.{os.getpid()}"
        part.write_bytes(b"w" * 4096)
        part.rename(directory / WEIGHTS)
    return str(directory)


def pull_from_hub(told: Connection) -> None:
    told.send("ready")
    told.recv()
    told.send(str(model_directory("owner/name", fetch=fetch)))


def test_of_replicas_that_start_together_one_copies(checkpoint: Path, tmp_path: Path) -> None:
    cache, log = tmp_path / "local", tmp_path / "log"
    pipes = [PROCESSES.Pipe() for _ in range(4)]
    replicas = [PROCESSES.Process(target=pull, args=(checkpoint, cache, log, there)) for _, there in pipes]
    for replica in replicas:
        replica.start()
    assert [hear(here) for here, _ in pipes] == ["ready"] * 4
    for here, _ in pipes:
        here.send("go")
    found = {hear(here) for here, _ in pipes}
    for replica in replicas:
        replica.join(BOUND_S)
        assert replica.exitcode == 0
    assert len(log.read_text().splitlines()) == 1
    ((copied, _, size),) = found
    assert size == 1 << 16
    assert (Path(copied) / WEIGHTS).read_bytes() == (checkpoint / WEIGHTS).read_bytes()
    assert not (Path(copied) / "README.md").exists()


def test_a_replica_that_is_killed_while_it_copies_makes_way(checkpoint: Path, tmp_path: Path) -> None:
    cache, log = tmp_path / "local", tmp_path / "log"
    here, there = PROCESSES.Pipe()
    killed = PROCESSES.Process(target=pull_and_stop, args=(checkpoint, cache, there))
    killed.start()
    assert hear(here) == "half"
    assert [path for path in cache.iterdir() if not path.name.startswith(".")] == [], "half is not all"
    waits, told = PROCESSES.Pipe()
    next_one = PROCESSES.Process(target=pull, args=(checkpoint, cache, log, told))
    next_one.start()
    assert hear(waits) == "ready"
    waits.send("go")
    assert not waits.poll(0.5), "it waits while the other lives"
    killed.kill()
    killed.join(BOUND_S)
    copied, _, size = hear(waits)  # type: ignore[misc]
    next_one.join(BOUND_S)
    assert size == 1 << 16
    assert (Path(copied) / WEIGHTS).read_bytes() == (checkpoint / WEIGHTS).read_bytes()
    assert {path.name for path in cache.iterdir()} == {".locks", Path(copied).name}, "nothing partial is left"


def test_a_hub_model_is_downloaded_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUB", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf"))
    pipes = [PROCESSES.Pipe() for _ in range(3)]
    replicas = [PROCESSES.Process(target=pull_from_hub, args=(there,)) for _, there in pipes]
    for replica in replicas:
        replica.start()
    assert [hear(here) for here, _ in pipes] == ["ready"] * 3
    for here, _ in pipes:
        here.send("go")
    assert {hear(here) for here, _ in pipes} == {str(tmp_path)}
    for replica in replicas:
        replica.join(BOUND_S)
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def test_a_copy_is_made_again_when_the_checkpoint_has_changed(checkpoint: Path, tmp_path: Path) -> None:
    first = model_directory(str(checkpoint), cache=tmp_path / "local")
    assert model_directory(str(checkpoint), cache=tmp_path / "local") == first
    (checkpoint / WEIGHTS).write_bytes(b"a new version")
    second = model_directory(str(checkpoint), cache=tmp_path / "local")
    assert second != first
    assert (second / WEIGHTS).read_bytes() == b"a new version"
    assert (first / WEIGHTS).stat().st_size == 1 << 16, "workers of the old version go on"


def test_the_wait_has_a_bound(tmp_path: Path) -> None:
    lock = tmp_path / "x.lock"
    with (
        once_per_host(lock),
        pytest.raises(ConfigError, match="has been pulling it"),
        once_per_host(lock, 0.2),
    ):
        pass


def test_a_cache_that_cannot_be_written_is_named(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        model_directory(str(checkpoint), cache=tmp_path / "file" / "cache")
    assert caught.value.key == "model_cache"
