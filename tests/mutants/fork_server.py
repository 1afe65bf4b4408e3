"""Runs pytest in forks of a process that has imported torch and transformers already.

Those imports are most of the processor time of a short test, and a mutant cannot change them. The tree's own
modules are imported after the fork, from the folder in which this runs.

python -m tests.mutants.fork_server: each line of the input is JSON, `[output file, seconds, [pytest's
arguments]]`; each is answered with a line, pytest's exit code or "hung".
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

import pytest

_SLOW_IMPORTS = ("torch", "transformers.activations", "transformers.conversion_mapping", "pydantic")
_IMPORTED_BEFORE = "ignore:Module already imported so cannot be rewritten"  # pytest's warning of a plugin


def main() -> None:
    """Until the input ends. The process has one thread, so that a fork is whole."""
    for name in _SLOW_IMPORTS:
        importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        output, seconds, arguments = json.loads(line)
        sys.stdout.write(f"{_run(output, seconds, arguments)}\n")
        sys.stdout.flush()


def _run(output: str, seconds: float, arguments: Sequence[str]) -> str:
    child = os.fork()
    if child == 0:
        _be_pytest(output, arguments)
    ended = os.pidfd_open(child)
    in_time, _, _ = select.select([ended], [], [], seconds)
    os.close(ended)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what the tests left running, too
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return str(os.waitstatus_to_exitcode(status)) if in_time else "hung"


def _be_pytest(output: str, arguments: Sequence[str]) -> None:
    """In the child; never returns."""
    status = int(pytest.ExitCode.INTERNAL_ERROR)
    try:
        os.setsid()
        written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (written, 1), (written, 2)):
            os.dup2(source, target)
        status = int(pytest.main(["-W", _IMPORTED_BEFORE, *arguments]))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
