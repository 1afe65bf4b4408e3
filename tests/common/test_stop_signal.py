"""A process that waits for the signals that end it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WAITS = """
import sys
from common.stop_signal import StopSignal
stop = StopSignal()
assert not stop.wait(0.01)
print("up", flush=True)
print(stop.wait(), stop.wait(0.0), stop.wait(), flush=True)
"""
# A handler runs between any two steps of the wait. An Event hangs here within the first few thousand signals.
INTERRUPTED = """
import os, signal, threading
from common.stop_signal import StopSignal

def send():
    for _ in range(30_000):
        os.kill(os.getpid(), signal.SIGINT)

stop, sender = StopSignal(), threading.Thread(target=send)
sender.start()
while sender.is_alive():
    stop.wait(0.0)
    stop._came = False
print("through", flush=True)
"""


def start(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_comes_once_and_stays(number: signal.Signals) -> None:
    with start(WAITS) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        assert process.communicate(timeout=20.0)[0] == "True True True\n"
    assert process.returncode == 0


def test_a_wait_that_a_signal_interrupts_hangs_nowhere() -> None:
    with start(INTERRUPTED) as process:
        try:
            assert process.communicate(timeout=60.0)[0] == "through\n"
        finally:
            process.kill()
