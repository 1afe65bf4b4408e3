"""`python -m tests.support.switching_worker --options FILE.json ROLE`: a worker that can change its role."""

from __future__ import annotations

import sys

from decode_node.role import DecodeRole
from prefill_node.role import PrefillRole
from wire.records import Role
from worker.main import run_worker
from worker.options import WorkerOptions
from worker.switch import SwitchingWorker

DRAIN_S = 20.0


def make(options: WorkerOptions) -> SwitchingWorker:
    """A worker that begins in the role of the command line."""
    roles = {Role.PREFILL: PrefillRole, Role.DECODE: DecodeRole}
    return SwitchingWorker(options, roles, FIRST, DRAIN_S)


if __name__ == "__main__":
    FIRST = Role(sys.argv.pop())
    sys.exit(run_worker("switching_worker", make))
