"""The decode worker: a scheduler loop with the decode role of the hand-off."""

from __future__ import annotations

from collections.abc import Callable

from decode_node.role import DecodeRole
from worker.loop import Worker
from worker.options import WorkerOptions


class DecodeWorker(Worker):
    """A worker in the decode role."""

    def __init__(self, options: WorkerOptions, resolve_directory: Callable[[], str] | None = None) -> None:
        """See Worker. `resolve_directory` finds a directory that may move; default: `options.directory`."""
        super().__init__(options, DecodeRole, resolve_directory)
