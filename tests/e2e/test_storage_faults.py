"""Storage that fails under real workers: killed writers, spoilt pages, full disks, calls that raise.

Each is a miss, is counted, and costs a computation, never a token.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.local_stack import Stack
from tests.support.reference import draw_model, reference_generate
from tests.support.tiered_stack import PAGE_SIZE, refused, storages, tiered, wait_until_stored

NEW_TOKENS = 12
FAILING = "tests.support.failing_store:FailingStore"


def drawn(count: int, length: int, seed: int) -> list[list[int]]:
    """Prompts that have nothing in common."""
    draw = random.Random(seed)
    return [[draw.randrange(250) for _ in range(length)] for _ in range(count)]


def assert_right(running: Stack, model: Path, prompts: list[list[int]]) -> None:
    """One after the other; every answer is the oracle's."""
    for prompt in prompts:
        answer = running.generate(prompt, NEW_TOKENS)["output_ids"]
        assert answer == reference_generate(model, prompt, NEW_TOKENS)[0]


def ask(running: Stack, model: Path, prompts: list[list[int]]) -> None:
    """The same; then nothing is held, and all is stored."""
    assert_right(running, model, prompts)
    running.settle()
    wait_until_stored(running)


def restart(running: Stack) -> None:
    """All workers, so that nothing but storage knows what was computed."""
    for worker in list(running.workers):
        worker.kill()
        running.start_again(worker)


def page_files(storage: Path) -> list[Path]:
    """The files of pages, in a fixed order."""
    return sorted(storage.glob("??/*"))


# -- killed writers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "fsync"),
    [
        ("half", False),
        pytest.param("half", True, marks=pytest.mark.e2e),
        pytest.param("whole", False, marks=pytest.mark.e2e),
        pytest.param("whole", True, marks=pytest.mark.e2e),
        pytest.param("linked", False, marks=pytest.mark.e2e),
        pytest.param("linked", True, marks=pytest.mark.e2e),
    ],
)
def test_a_worker_killed_in_a_write_leaves_a_storage_that_serves(
    place: str, fsync: bool, tmp_path: Path
) -> None:
    prompts = drawn(3, 100, seed=7)
    model, _ = draw_model("qwen3", tmp_path / "models", 3, prompts, NEW_TOKENS)
    storage = tmp_path / "kv"
    with tiered(model, tmp_path / "one", storage, 0, 2, hicache_storage_fsync=fsync) as running:
        first, second = running.decode
        first.kill()
        dying = running.start_again(first, ("tests.support.dies_in_storage_write", "7", place))
        # The other worker goes on with what the dying one began.
        assert_right(running, model, [*prompts, *prompts])
        assert dying.process.wait(20) == -9
        wait_until_stored(running, second)
        left = [file.stat() for file in (storage / "partial").iterdir()]
        assert [file.st_nlink for file in left] == [2 if place == "linked" else 1]
        whole = page_files(storage)[0].stat().st_size
        assert all((file.st_size < whole) is (place == "half") for file in left)
        second.kill()
        for worker in (dying, second):
            running.start_again(worker)
        ask(running, model, [*prompts, *prompts])
        assert sum(one["read_pages"] for one in storages(running)) >= 2 * sum(
            len(prompt) // PAGE_SIZE for prompt in prompts
        )
        assert refused(running) == {}, "a torn page was found"


# -- spoilt pages ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", ["qwen3", *(pytest.param(one, marks=pytest.mark.e2e) for one in ("gpt_oss", "qwen3_next"))]
)
def test_a_flipped_bit_in_each_of_100_pages_is_a_miss_each(family: str, tmp_path: Path) -> None:
    prompts = drawn(10, 88, seed=8)
    model, answers = draw_model(family, tmp_path / "models", 3, prompts, NEW_TOKENS)
    again = [[*prompt, *answer, 7] for prompt, answer in zip(prompts, answers, strict=True)]
    storage = tmp_path / "kv"
    with tiered(model, tmp_path / "one", storage, 0, 1) as running:
        ask(running, model, prompts)
        stored = page_files(storage)
        assert len(stored) >= 120
        spoilt = {path: flipped(path, seed) for seed, path in enumerate(random.Random(8).sample(stored, 100))}
        restart(running)
        ask(running, model, again)
        found = [path for path, raw in spoilt.items() if not path.exists() or path.read_bytes() != raw]
        assert refused(running) == {"corrupt": len(found)}
        assert len(found) == 100 or family != "qwen3", "with full attention alone all pages are read"
        restart(running)
        ask(running, model, again)
        assert sum(refused(running).values()) <= 100 - len(found)
        assert storages(running)[0]["read_pages"] > 0


def flipped(path: Path, seed: int) -> bytes:
    """What the file has now: one bit differs, of the page or of its seal."""
    raw = bytearray(path.read_bytes())
    bit = random.Random(seed).randrange(8 * len(raw))
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)
    return bytes(raw)


# -- places that fail ------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MB."""
    mounted = tmp_path / "small"
    mounted.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", mounted],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip(f"a file system cannot be mounted here: {made.stderr.strip()}")
    yield mounted
    subprocess.run(["umount", "-l", mounted], check=True)


def test_a_full_disk_costs_no_token(small_disk: Path, tmp_path: Path) -> None:
    prompts = drawn(6, 120, seed=9)
    model, _ = draw_model("qwen3", tmp_path / "models", 3, prompts, NEW_TOKENS)
    storage = small_disk / "kv"
    with tiered(model, tmp_path / "one", storage, 1, 1) as running:
        ask(running, model, prompts[:1])
        with (small_disk / "others").open("wb", buffering=0) as file:
            while file.write(bytes(1 << 20)) == 1 << 20:  # a write that is cut short has filled it
                pass
        ask(running, model, prompts[1:])
        full = refused(running)
        assert full["full"] > 0
        assert set(full) == {"full"}
        assert sum(one["failed_writes"] for one in storages(running)) > 0
        (small_disk / "others").unlink()
        # While the disk was full, old pages may have made room for some of new ones.
        restart(running)
        ask(running, model, prompts)
        restart(running)
        ask(running, model, prompts)
        assert refused(running) == {}
        said = storages(running)
        assert sum(one["read_pages"] for one in said) > 0, said


@pytest.mark.parametrize(
    ("fault", "family"),
    [
        ("raise", "qwen3"),
        pytest.param("raise", "qwen3_next", marks=pytest.mark.e2e),
        pytest.param("refuse", "qwen3", marks=pytest.mark.e2e),
        pytest.param("refuse", "gpt_oss", marks=pytest.mark.e2e),
    ],
)
def test_reads_and_writes_that_fail_cost_no_token(fault: str, family: str, tmp_path: Path) -> None:
    prompts = drawn(8, 90, seed=10)
    model, _ = draw_model(family, tmp_path / "models", 3, prompts, NEW_TOKENS)
    extra = {"fault": fault, "every": 3}
    options = {"hicache_storage_backend": FAILING, "hicache_storage_backend_extra_config": extra}
    with tiered(model, tmp_path / "one", tmp_path / "kv", 1, 1, **options) as running:
        for time_around in range(3):
            ask(running, model, prompts)
            assert refused(running)["io_error"] > 0
            assert set(refused(running)) == {"io_error"}
            failed = sum(one["failed_writes"] for one in storages(running))
            assert failed > 0 or time_around, "what was not there had to be written"
            restart(running)
        ask(running, model, prompts)
        assert sum(one["read_pages"] for one in storages(running)) > 0, "the others are hits"
