"""The balance check of idle workers: when it runs, what it names, and that a worker that fails it ends."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvcache.balance import SLICE_NODES, OutOfBalance
from kvcache.components.base import Tally
from kvcache.memory import Memory
from kvcache.radix_cache import RadixCache
from kvcache.radix_key import Namespace, RadixKey
from kvcache.tree_node import TreeNode
from tests.scheduler.rig import Rig
from tests.support.hand_off import pair, prompt_of
from wire.messages.directory import Announced
from worker.idle_check import IdleCheck


class Checked:
    """Memory whose check has this many slices."""

    def __init__(self, slices: int = 0) -> None:
        self.slices = slices
        self.version = 0
        self.fails = False
        self.log: list[str] = []  # what was done; a slice is one dot

    def check_slices(self) -> Iterator[None]:
        self.log.append("begin")
        for _ in range(self.slices):
            self.log.append(".")
            yield
        assert not self.fails
        self.log.append("end")

    def check_memory(self) -> None:
        self.log.append("whole")
        assert not self.fails, "out of balance"

    def memory_version(self) -> Hashable:
        return self.version


def test_it_runs_after_a_quiet_second_and_then_at_intervals() -> None:
    memory = Checked()
    check = IdleCheck(memory, 30.0)
    at = []
    for step in range(400):
        now = step / 4
        check.turn(not 10 <= now < 45, now)
        if memory.log:
            at.append(now)
            memory.log.clear()
    assert at == [1.0, 46.0, 76.0]


def test_a_check_that_takes_long_runs_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 1000, 2))  # each slice takes 2 s
    monkeypatch.setattr("worker.idle_check.time.perf_counter", lambda: next(ticks))
    memory = Checked()
    check = IdleCheck(memory, 30.0)
    at = []
    for now in range(500):
        check.turn(True, now)
        if memory.log:
            at.append(now)
            memory.log.clear()
    assert at == [1, 201, 401], "it takes at most a hundredth of the time"


def test_one_slice_a_turn_and_the_rest_only_while_nothing_happens() -> None:
    memory = Checked(slices=3)
    check = IdleCheck(memory, 30.0)
    turns = itertools.count()

    def turn(idle: bool = True) -> None:
        check.turn(idle, next(turns) * 100.0)

    turn()
    turn()
    turn()
    assert memory.log == ["begin", ".", "."]
    assert check.running
    turn(idle=False)
    assert not check.running, "there is work"
    turn()
    turn()
    memory.version += 1
    turn()
    assert not check.running, "memory has changed"
    for _ in range(4):
        assert memory.log[-1] != "end"
        turn()
    assert memory.log == ["begin", ".", ".", "begin", ".", "begin", ".", ".", ".", "end"]
    assert not check.running


def test_what_a_slice_finds_is_looked_at_in_one_go() -> None:
    memory = Checked(slices=1)
    check = IdleCheck(memory, 30.0)
    memory.fails = True
    check.turn(True, 0.0)
    check.turn(True, 10.0)
    with pytest.raises(AssertionError, match="out of balance"):
        check.turn(True, 20.0)
    assert memory.log == ["begin", ".", "whole"]


def conversations(memory: Memory, count: int, turns: int, pages: int) -> None:
    """Fill the tree: `count` paths of `turns` nodes of `pages` pages."""
    cache = memory.cache
    assert isinstance(cache, RadixCache)
    page_size = memory.page_size
    for i in range(count):
        tokens = np.arange(turns * pages * page_size, dtype=np.int32) + i * 1_000_000
        for turn in range(1, turns + 1):
            key = RadixKey(tokens[: turn * pages * page_size], Namespace("m"))
            ids = memory.allocator.alloc_pages(turn * pages)
            assert ids is not None
            inserted = cache.insert(key, ids)
            memory.allocator.free_page_ids(ids[: inserted.prefix_len // page_size])


def test_a_slice_has_a_bounded_number_of_nodes_and_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(page_size=1, pool_tokens=40_000)
    conversations(rig.memory, 1000, 5, 2)
    component = rig.memory.cache.tree.components[0]
    tally, slices = component.tally, []

    def counting(nodes: Sequence[TreeNode], into: Tally) -> None:
        slices.append((len(nodes), sum(node.num_pages for node in nodes)))
        tally(nodes, into)

    monkeypatch.setattr(component, "tally", counting)
    steps = sum(1 for _ in rig.scheduler.check_slices())
    assert sum(nodes for nodes, _ in slices) == 5000
    assert max(nodes for nodes, _ in slices) == SLICE_NODES
    assert steps >= len(slices), "no yield between two slices of the tree"
    monkeypatch.setattr("kvcache.balance.SLICE_PAGES", 64)
    slices.clear()
    assert sum(1 for _ in rig.scheduler.check_slices()) > 2 * 40_000 / 64, "a yield every 64 pages"
    assert max(pages for _, pages in slices) == 64


@pytest.mark.parametrize("group", ["full", "window", "state"])
def test_a_lost_page_is_named_with_the_requests_that_may_have_lost_it(group: str) -> None:
    rig = Rig(groups=() if group == "full" else (group,))
    rig.add(range(50), 5)
    rig.run()
    rig.scheduler.check_memory()
    over = rig.add(range(70), 5)
    while not rig.scheduler.idle:
        rig.scheduler.step()
    lost = rig.memory.allocators[group].alloc_pages(1)
    assert lost is not None
    with pytest.raises(OutOfBalance) as found:
        rig.scheduler.check_memory()
    assert (found.value.of, found.value.numbers.tolist()) == (group, lost.tolist())
    assert f"rooms ['{over.room}.1']" in str(found.value), "rooms of before the last good check are not named"


@pytest.mark.parametrize("group", ["full", "window", "state"])
def test_a_page_with_two_owners_is_named_with_its_request(group: str) -> None:
    rig = Rig(groups=() if group == "full" else (group,))
    req, _ = rig.add(range(50), 50), rig.add(range(100, 150), 50)
    for _ in range(3):
        rig.step()
    pages = rig.scheduler._requests.pages.private_pages(req)[group]
    rig.memory.free({group: pages[-1:]})
    with pytest.raises(OutOfBalance, match="owned twice") as found:
        rig.scheduler.check_memory()
    assert f"held by rooms ['{req.room}.1']" in str(found.value)


def test_a_row_with_two_owners_is_named_with_its_request() -> None:
    rig = Rig()
    req = rig.add(range(50), 50)
    rig.step()
    assert req.req_pool_idx is not None
    rig.memory.req_to_token_pool.free(req.req_pool_idx)
    with pytest.raises(OutOfBalance, match=rf"rows owned twice.*held by rooms \['{req.room}.1'\]"):
        rig.scheduler.check_memory()


def test_idle_workers_check_between_requests() -> None:
    with pair() as both:
        memories = [Checked(slices=2), Checked(slices=2)]
        for worker, memory in zip((both.prefill, both.decode), memories, strict=True):
            worker._idle_check._memory = memory
        both.ask(1, prompt_of(1, 30), 5)
        both.run_dry()
        assert [memory.log for memory in memories] == [[], []]
        for _ in range(8):
            both.pass_time(0.6)
        assert [memory.log for memory in memories] == [["begin", ".", ".", "end"]] * 2
        both.settle()


def test_an_idle_worker_that_hears_from_its_directory_checks_its_memory() -> None:
    """Answers of the directory come every second, which is how long a worker must be quiet."""
    with pair() as both:
        both.decode._idle_check._memory = memory = Checked(slices=2)
        for _ in range(20):
            both.pass_time(0.25)
            both.post(both.decode, Announced(both.decode.id, 1, 3.0))
            both.run_dry()
        assert memory.log == ["begin", ".", ".", "end"]


OUT_OF_BALANCE = """
import json
import subprocess
import sys
from decode_node.worker import DecodeWorker
from worker.main import run_worker

def make(options):
    worker = DecodeWorker(options)
    worker.parts.services.memory.allocator.alloc_pages(3)
    return worker

sys.exit(run_worker("leaking", make))
"""


def test_a_worker_out_of_balance_ends_so_that_it_is_replaced(tmp_path: Path) -> None:
    options = tmp_path / "options.json"
    options.write_text(json.dumps({"model": "m", "engine": "fake", "max_total_tokens": 1024}))
    program = tmp_path / "leaking.py"
    program.write_text(OUT_OF_BALANCE)
    done = subprocess.run(
        [sys.executable, str(program), "--options", str(options)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1, done.stderr
    assert "died: OutOfBalance(" in done.stderr.splitlines()[-1]
    assert "3 pages lost" in done.stderr.splitlines()[-1]
