"""Our programs as child processes: a JSON options file in, one JSON line when ready, ended by handle."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tests.harness.fork import ForkedProgram

FORKED = ("prefill_node", "decode_node", "tests.support.switching_worker", "router", "router.directory")
"""The programs whose imports take most of their time in a test."""
_NETWORK = "/proc/thread-self/ns/net"
_OWN_NETWORK = os.stat(_NETWORK).st_ino
READY_S = 120.0
END_S = 60.0


class ChildFailed(RuntimeError):
    """A child did not get ready, or did not end when asked to; the message holds the end of its log."""


class Child:
    """`python -m [RUNNER] MODULE --options FILE [ARGUMENTS]`. `ready` holds its ready line."""

    def __init__(
        self,
        module: str,
        options: dict[str, Any],
        directory: Path,
        runner: tuple[str, ...] = (),
        arguments: tuple[str, ...] = (),
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """`runner` is a module (and its arguments) that runs the program under other conditions."""
        directory.mkdir(parents=True, exist_ok=True)
        file = directory / f"{module}-{len(list(directory.iterdir()))}.json"
        file.write_text(json.dumps(options))
        self.module = module
        self.options = options
        self.arguments = arguments
        self.log = file.with_suffix(".log")
        environment = {**environment, "TOKENIZERS_PARALLELISM": "false"}
        command = [*runner, module, "--options", str(file), *arguments]
        self.process: ForkedProgram | subprocess.Popen[bytes]
        # The process that forks stays in the network in which it was started; tests/hosts enters others.
        if module in FORKED and os.stat(_NETWORK).st_ino == _OWN_NETWORK:
            self.process = ForkedProgram(command[0], command[1:], environment, self.log)
        else:
            with self.log.open("w") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=log, env=environment
                )
        self.ready: dict[str, Any] = {}

    def wait_ready(self, timeout_s: float = READY_S) -> dict[str, Any]:
        """The ready line. Raises with the child's log when it does not come."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        line = b""
        while not line.endswith(b"\n"):
            readable, _, _ = select.select(
                [self.process.stdout], [], [], max(0.0, deadline - time.monotonic())
            )
            piece = os.read(self.process.stdout.fileno(), 65536) if readable else b""
            if not piece:
                raise ChildFailed(f"{self.module} did not get ready:\n{self.log.read_text()[-4000:]}")
            line += piece
        self.ready = json.loads(line)
        return self.ready

    def ask_to_end(self) -> None:
        """SIGTERM, without waiting: children that end together take as long as one."""
        if self.process.poll() is None:
            self.process.terminate()

    def end(self) -> None:
        """SIGTERM, then SIGKILL after a bound. A child that had to be killed is an error."""
        try:
            self.ask_to_end()
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ChildFailed(f"{self.module} ignored SIGTERM:\n{self.log.read_text()[-4000:]}") from None
        finally:
            if self.process.stdout is not None:
                self.process.stdout.close()

    def kill(self) -> None:
        """SIGKILL, as when the machine fails."""
        self.process.kill()
        self.process.wait(END_S)

    def refusal(self) -> str:
        """What a program says on stderr that ends by itself with code 2, and prints nothing."""
        code = self.process.wait(END_S)
        assert self.process.stdout is not None
        told = self.log.read_text()
        with self.process.stdout as stdout:
            assert (code, stdout.read()) == (2, b""), told
        return told

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
