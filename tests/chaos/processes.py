"""Forked: one of our programs in a process forked from one that has imported everything.

A worker is ready after a fraction of a second. The harness watches its stages and sets its gates.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from signal import SIGCONT, SIGKILL, Signals
from typing import Any, NamedTuple

from tests.chaos.observed import Observed
from tests.harness.fork import FORKSERVER, PRELOADED

FORKSERVER.set_forkserver_preload(["tests.chaos.child", PRELOADED])
_READY_S, _END_S = 60.0, 30.0
_POLL_S = 0.01


class Launch(NamedTuple):
    """What to start."""

    name: str  # of the process in the network, such as "P/0-7"
    module: str
    options: Mapping[str, Any]


class Forked:
    """A running program. `observed` is what it has reported of itself."""

    def __init__(self, launch: Launch, network: str, directory: Path) -> None:
        """Fork and run it, with files in `directory`."""
        self.launch = launch
        self.name = launch.name
        stem = directory / launch.name.replace("/", "-")
        self.log, self._out = stem.with_suffix(".log"), stem.with_suffix(".out")
        options = stem.with_suffix(".json")
        options.write_text(json.dumps(dict(launch.options)))
        self._out.touch()
        self.observed = Observed()
        self._pipe, theirs = FORKSERVER.Pipe()
        arguments = ["--options", str(options)]
        self._process = FORKSERVER.Process(
            target=_run, args=(network, launch.name, launch.module, arguments, (self._out, self.log), theirs),
            daemon=True,
        )  # fmt: skip
        self._process.start()
        theirs.close()
        self.pid = self._process.pid or 0
        self.ready: dict[str, Any] = {}
        threading.Thread(target=self._watch, name=f"watch {self.name}", daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether the process runs, perhaps stopped."""
        return self._process.is_alive()

    def wait_ready(self) -> None:
        """Until the program has said that it is ready. Raises RuntimeError with its log when it does not."""
        deadline = time.monotonic() + _READY_S
        while not (line := self._out.read_text()).endswith("\n"):
            if not self.alive or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} did not get ready:\n{self.log.read_text()[-3000:]}")
            time.sleep(_POLL_S)
        self.ready = json.loads(line.splitlines()[0])

    def set_gates(self, held: frozenset[str] = frozenset(), pace: Mapping[str, float] | None = None) -> None:
        """Hold forwards and writes of these kinds from now on, and let the others take so many seconds."""
        with contextlib.suppress(OSError):  # it has ended
            self._pipe.send((sorted(held), dict(pace or {})))

    def send_signal(self, number: Signals) -> None:
        """Send a signal, if the process is there."""
        if self.alive:
            os.kill(self.pid, number)

    def end(self, number: Signals = SIGKILL) -> bool:
        """Signal it and wait until it has ended. Whether it ended in time; it is killed if not."""
        self.send_signal(SIGCONT)
        self.send_signal(number)
        self._process.join(_END_S)
        in_time = not self.alive
        if not in_time:
            self._process.kill()
            self._process.join(_END_S)
        self._pipe.close()
        return in_time

    def kill(self) -> None:
        """SIGKILL, and nothing else: the fault."""
        self._process.kill()
        self._process.join(_END_S)

    def descriptors(self) -> int:
        """How many files, sockets and so on it has open; 0 when it has ended."""
        try:
            return len(os.listdir(f"/proc/{self.pid}/fd"))
        except OSError:
            return 0

    def _watch(self) -> None:
        while True:
            try:
                self.observed.add(self._pipe.recv())
            except (EOFError, OSError, TypeError):  # it has ended, or `end` has closed the pipe
                return


def _run(
    network: str, name: str, module: str, arguments: list[str], files: tuple[Path, Path], pipe: Connection
) -> None:
    """The child is imported where it runs: this process needs neither torch nor the workers' code."""
    from tests.chaos.child import run_child

    run_child(network, name, module, arguments, files, pipe)
