"""Processes forked from one that has imported torch, transformers, the workers and the router."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any

FORKSERVER = multiprocessing.get_context("forkserver")
"""One for all tests of a job. The process that it forks from has neither other threads nor sockets."""
PRELOADED = "tests.harness.preloaded"
FORKSERVER.set_forkserver_preload([PRELOADED])


class ForkedProgram:
    """`python -m MODULE ARGUMENTS` without a new interpreter. It has what tests use of subprocess.Popen.

    /proc shows the environment of the process that it was forked from.
    """

    def __init__(
        self, module: str, arguments: Sequence[str | Passed], environment: Mapping[str, str], log: Path
    ) -> None:
        """Its stderr goes to `log`."""
        reading, writing = os.pipe()
        self.stdout: IO[bytes] = os.fdopen(reading, "rb", 0)
        try:
            self._process = FORKSERVER.Process(
                target=_run, args=(module, arguments, dict(environment), log, Passed(writing)), daemon=True
            )
            self._process.start()
        finally:
            os.close(writing)
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """The exit code, minus the signal that ended it; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Until it has ended. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, if it runs."""
        with suppress(ProcessLookupError):  # it has ended, and its code has not arrived yet
            if self.poll() is None:
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Passed:
    """A descriptor that is duplicated into the process that gets this as an argument: there it is its
    number."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> Any:
        return _detached, (DupFd(self._descriptor),)


def _detached(passed: Any) -> int:
    return int(passed.detach())


def _run(
    module: str, arguments: Sequence[str | int], environment: dict[str, str], log: Path, stdout: int
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    errors = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for source, target in ((stdout, 1), (errors, 2)):
        os.dup2(source, target)
        os.close(source)
    sys.argv = [module, *map(str, arguments)]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
