"""The exit of a worker process on this host is told once, and only of the process that is meant."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from common.host import host_identity, process_start
from router.local_workers import LocalWorkers
from tests.router.directory.test_directory import record
from wire.records import WorkerRecord

PATIENCE_S = 20.0


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    one = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield one
    one.kill()
    one.communicate()


def worker(process: subprocess.Popen[bytes]) -> WorkerRecord:
    start = process_start(process.pid)
    return replace(record("w"), host=host_identity(), pid=process.pid, process_start=start)


def told_at_once(*records: WorkerRecord) -> list[WorkerRecord]:
    """Whose exit is told before the loop turns."""
    told: list[WorkerRecord] = []

    async def run() -> None:
        local = LocalWorkers(told.append)
        local.update(records)
        local.close()

    asyncio.run(run())
    return told


def test_the_exit_of_a_worker_is_told_once(process: subprocess.Popen[bytes]) -> None:
    async def run() -> None:
        told: asyncio.Queue[WorkerRecord] = asyncio.Queue()
        local = LocalWorkers(told.put_nowait)
        one = worker(process)
        local.update([one])
        assert told.empty()
        process.kill()
        assert await asyncio.wait_for(told.get(), PATIENCE_S) == one
        local.update([one])
        assert told.empty(), "told twice"
        local.close()

    asyncio.run(run())


def test_a_worker_that_has_exited_before_is_told_at_once(process: subprocess.Popen[bytes]) -> None:
    one = worker(process)
    process.kill()
    process.wait()
    assert told_at_once(one) == [one]


def test_another_process_under_the_same_pid_is_not_the_worker(process: subprocess.Popen[bytes]) -> None:
    one = worker(process)
    stale = replace(one, process_start=one.process_start - 1)
    assert told_at_once(stale) == [stale]
    assert told_at_once(one) == []


def test_workers_elsewhere_or_of_unknown_start_are_not_watched(process: subprocess.Popen[bytes]) -> None:
    one = worker(process)
    process.kill()
    process.wait()
    assert told_at_once(replace(one, host="elsewhere"), replace(one, process_start=0)) == []


def test_a_worker_that_left_the_view_is_watched_no_more(process: subprocess.Popen[bytes]) -> None:
    async def run() -> None:
        told: list[WorkerRecord] = []
        local = LocalWorkers(told.append)
        before = len(os.listdir("/proc/self/fd"))
        local.update([worker(process)])
        assert len(os.listdir("/proc/self/fd")) == before + 1
        local.update([])
        assert len(os.listdir("/proc/self/fd")) == before
        process.kill()
        process.wait()
        await asyncio.sleep(0)
        assert told == []

    asyncio.run(run())
