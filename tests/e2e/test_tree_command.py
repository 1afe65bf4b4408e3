"""`baton tree` against running workers: through the router, by name, and by mailbox address."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.local_stack import Stack, stack
from tests.support.kv_events_reader import pages_of

ROOT = Path(__file__).parents[2]
PAGE_SIZE = 8


@pytest.fixture(scope="module")
def running(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """1P + 1D that have answered two prompts with 32 tokens in common."""
    with stack(
        tiny_model,
        tmp_path_factory.mktemp("tree"),
        router={"prefill_on_decode_tokens": 0},
        engine="fake",
        page_size=PAGE_SIZE,
        max_total_tokens=2048,
    ) as found:
        for last in (1, 2):
            found.generate([*range(32), *[last] * 16], 9)
        found.settle()
        yield found


def tree(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cluster.cli", "tree", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=dict(os.environ),
    )


def test_every_worker_of_a_router_is_shown(running: Stack) -> None:
    done = tree("--url", running.router.ready["admin"])
    assert (done.returncode, done.stderr) == (0, "")
    shown = dict(part.split("\n", 1) for part in done.stdout.strip().split("\n\n"))
    assert set(shown) == {worker.ready["id"] for worker in running.workers}
    for worker in running.workers:
        assert shown[worker.ready["id"]] == running.inspect(worker, "tree").strip()
        assert "[0 1 2 3 4 5 6 7" in shown[worker.ready["id"]]


def test_json_has_every_node_with_all_its_tokens(running: Stack) -> None:
    done = tree("--url", running.router.ready["admin"], "--json", running.prefill[0].ready["id"])
    assert (done.returncode, done.stderr) == (0, "")
    ((name, nodes),) = json.loads(done.stdout).items()
    assert name == running.prefill[0].ready["id"]
    assert len(pages_of(nodes, "m", PAGE_SIZE)) == 4 + 2 * 2
    (shared,) = (node for node in nodes if node["parent"] == -1)
    assert shared["tokens"] == list(range(32))
    assert shared["held"]["full"] == 32
    assert shared["lock"] == 0, "both requests are over"
    assert shared["hits"] > max(node["hits"] for node in nodes if node is not shared)


def test_a_worker_is_asked_at_its_address(running: Stack) -> None:
    address = running.decode[0].ready["mailbox"]
    done = tree(address)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{address}\n{running.inspect(running.decode[0], 'tree')}\n"


def test_an_unknown_worker_is_told_whom_there_is(running: Stack) -> None:
    done = tree("--url", running.router.ready["admin"], "nobody")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "'nobody'" in done.stderr
    for worker in running.workers:
        assert worker.ready["id"] in done.stderr
