"""What runs in a process of a chaos run: one of our programs, behind the network and with gates.

Processes are forked from one that has imported this module (tests/chaos/processes.py), because a worker's
imports take seconds and a run starts hundreds of workers.
"""

from __future__ import annotations

import ctypes
import os
import signal
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import worker.build
from engine.fake import fake_spec
from tests.chaos.gates import Gates, put_gates
from tests.chaos.launcher import NetworkClient, put_behind, run_program
from tests.support.tiny_configs import VOCAB_SIZE

_PR_SET_PDEATHSIG = 1


def run_child(
    network: str, name: str, module: str, arguments: list[str], files: tuple[Path, Path], pipe: Connection
) -> None:
    """Run the program. `files` take its stdout and stderr; `pipe` leads to the harness."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for file, descriptor in zip(files, (1, 2), strict=True):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    # Every token of the fake engine has a text in the tiny models' tokenizer.
    vars(worker.build)["fake_spec"] = partial(fake_spec, VOCAB_SIZE)
    put_behind(NetworkClient(network, name))
    put_gates(Gates(pipe))
    run_program(module, arguments)
