"""The balance check of idle workers: when it runs, what it names, and that a worker that fails it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvcache.memory import OutOfBalance
from tests.scheduler.rig import Rig
from tests.support.hand_off import pair, prompt_of
from worker.idle_check import IdleCheck
from worker.loop import Worker


def test_it_runs_after_a_quiet_second_and_then_at_intervals() -> None:
    at: list[float] = []
    clock = [0.0]
    check = IdleCheck(lambda: at.append(clock[0]), 30.0)
    for step in range(400):
        clock[0] = step / 4
        busy = 10 <= clock[0] < 45
        check.turn(not busy, clock[0])
    assert at == [1.0, 46.0, 76.0]


def test_a_check_that_takes_long_runs_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 1000, 2))  # each check takes 2 s
    monkeypatch.setattr("worker.idle_check.time.perf_counter", lambda: next(ticks))
    at: list[int] = []
    check = IdleCheck(lambda: at.append(now), 30.0)
    for now in range(500):
        check.turn(True, now)
    assert at == [1, 201, 401], "it takes at most a hundredth of the time"


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
        checks: list[Worker] = []
        for worker in (both.prefill, both.decode):
            worker._idle_check._check = lambda worker=worker: checks.append(worker)
        both.ask(1, prompt_of(1, 30), 5)
        both.run_dry()
        assert not checks
        for _ in range(3):
            both.pass_time(0.6)
        assert checks == [both.prefill, both.decode]
        both.settle()


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
