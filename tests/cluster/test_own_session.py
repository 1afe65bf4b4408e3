"""`cluster/own_session.py` with commands of a few lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_END_S = 20.0

_COMMAND = """
import os, signal, subprocess, sys, threading
from cluster.own_session import leave_session

def go_on():
    stop = threading.Event()
    {handlers}
    helper = subprocess.Popen(["sleep", "60"])
    print(os.getpid(), helper.pid, flush=True)
    {work}

code = leave_session()
sys.exit(go_on() if code is None else code)
"""
_STOPS = "signal.signal(signal.SIGTERM, lambda *_: stop.set())"
_ASKED = '[signal.signal(number, lambda *_: print("asked", flush=True)) for number in (2, 15)]'
_DRAIN = """stop.wait()
    print("helper", "runs" if helper.poll() is None else "has ended", flush=True)
    return 3"""

_REFUSE = "while True: signal.pause()"


class _Started:
    """A command in a process group of its own, and the PIDs that it printed."""

    def __init__(self, work: str, handlers: str = _STOPS) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND.format(work=work, handlers=handlers)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout
        command, helper = self.output.readline().split()
        self.helper = Path("/proc", helper)
        self.command = int(command)

    def close(self) -> None:
        """End what a failed test left."""
        self.process.kill()
        self.process.wait(_END_S)
        self.output.close()


@pytest.fixture
def drains() -> Iterator[_Started]:
    started = _Started(_DRAIN)
    yield started
    started.close()


def test_a_signal_to_the_group_reaches_the_command_alone(drains: _Started) -> None:
    os.killpg(drains.process.pid, signal.SIGTERM)
    assert drains.process.wait(_END_S) == 3
    assert drains.output.read() == "helper runs\n"
    assert not drains.helper.exists(), "what the command left is ended"


def test_the_command_ends_when_its_caller_is_killed(drains: _Started) -> None:
    drains.process.kill()
    assert drains.output.readline() == "helper runs\n"
    os.kill(int(drains.helper.name), signal.SIGKILL)  # nobody is left who would end it
    assert drains.output.read() == ""


@pytest.mark.parametrize(
    ("work", "code"),
    [("os.abort()", 128 + signal.SIGABRT), ("stop.wait(); os.abort()", 128 + signal.SIGTERM)],
    ids=["by itself", "when it is told to end"],
)
def test_a_crash_leaves_nothing(work: str, code: int) -> None:
    started = _Started(work)
    try:
        if "stop" in work:
            started.process.send_signal(signal.SIGTERM)
        assert started.process.wait(_END_S) == code
        assert not started.helper.exists()
    finally:
        started.close()


def test_the_third_signal_kills() -> None:
    started = _Started(_REFUSE, _ASKED)
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            started.process.send_signal(number)
            assert started.output.readline() == "asked\n"
        started.process.send_signal(signal.SIGINT)
        assert started.process.wait(_END_S) == 128 + signal.SIGINT
        assert not started.helper.exists()
    finally:
        started.close()
