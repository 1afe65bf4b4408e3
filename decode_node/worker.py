"""The decode worker: a Worker in the decode role."""

from __future__ import annotations

from collections.abc import Callable

from decode_node.role import DecodeRole
from worker.loop import Worker
from worker.options import WorkerOptions


class DecodeWorker(Worker):
    """A worker in the decode role."""

    def __init__(self, options: WorkerOptions, resolve_directory: Callable[[], str] | None = None) -> None:
        """See Worker."""
        super().__init__(options, DecodeRole, resolve_directory)
