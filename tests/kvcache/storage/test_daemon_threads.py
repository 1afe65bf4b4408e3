"""Threads that keep no process from ending."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from kvcache.storage.daemon_threads import DaemonThreads


def test_answers_and_failures_come_back() -> None:
    threads = DaemonThreads(2, "test")
    assert list(threads.map(pow, [2, 3], [5, 2])) == [32, 9]
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 // 0).result(10)
    threads.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        threads.submit(pow, 2, 5)


@pytest.mark.parametrize("drops", [False, True])
def test_calls_that_have_not_begun_are_done_or_dropped(drops: bool) -> None:
    threads, begun, go_on = DaemonThreads(1, "test"), threading.Event(), threading.Event()
    first = threads.submit(lambda: begun.set() or go_on.wait(10))
    dropped, waiting = threads.submit(pow, 2, 5), threads.submit(pow, 3, 2)
    assert begun.wait(10)
    assert dropped.cancel()
    threads.shutdown(wait=False, cancel_futures=drops)
    go_on.set()
    assert first.result(10) is True
    threads.shutdown(cancel_futures=drops)
    assert waiting.cancelled() is drops
    assert drops or waiting.result(0) == 9


def test_a_stuck_call_keeps_no_process() -> None:
    program = (
        "import threading\n"
        "from kvcache.storage.daemon_threads import DaemonThreads\n"
        "begun = threading.Event()\n"
        "DaemonThreads(1, 'test').submit(lambda: begun.set() or threading.Event().wait())\n"
        "assert begun.wait(10)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
