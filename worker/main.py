"""A worker as a plain process: `python -m prefill_node --options FILE.json`.

It prints one line of JSON when it is ready. On SIGTERM or SIGINT it drains, or exits at once if it has not
joined yet. It exits with 2 and one line on stderr when its options cannot work, and with 1 when its engine
loop or another of its threads has died or is stuck, or another process has taken its place.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from common.arguments import ExactParser
from common.errors import WorkerLost
from common.garbage import freeze_gc
from common.options import exit_on_config_error, read_options
from common.stop_signal import StopSignal
from worker.loop import Worker
from worker.options import WorkerOptions
from worker.switch import SwitchingWorker

_HEALTH_S = 1.0
_DRAIN_S = 20.0


def run_worker(
    program: str,
    make: Callable[[WorkerOptions], Worker | SwitchingWorker],
    arguments: Sequence[str] | None = None,
) -> int:
    """Run a worker until it is told to stop. Returns the exit code."""
    parser = ExactParser(prog=program, description=make.__doc__)
    parser.add_argument("--options", type=Path, required=True, help="JSON file of WorkerOptions")
    options_file: Path = parser.parse_args(arguments).options
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with exit_on_config_error(program):
        worker = make(read_options(WorkerOptions, options_file).here())
        try:
            return _serve(worker)
        except WorkerLost as error:
            sys.stderr.write(f"{error}\n")
            sys.stderr.flush()
            os._exit(1)  # a stuck thread cannot be joined, nor may what it uses be closed
        finally:
            worker.close()


def _serve(worker: Worker | SwitchingWorker) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)  # joining may take a minute, and no room runs yet
    record = worker.start()
    freeze_gc()
    stop = StopSignal()
    ready = {"ready": True, "id": record.id, "mailbox": record.mailbox, "events": record.events}
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()
    while not stop.wait(_HEALTH_S):
        worker.healthy()
    worker.drain(_DRAIN_S)
    return 0


def _leave(*_: object) -> NoReturn:
    raise SystemExit(0)
