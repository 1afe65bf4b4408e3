"""The decode worker: a scheduler loop with the decode half of the hand-off."""

from __future__ import annotations

from collections.abc import Callable

from decode_node.half import DecodeHalf
from scheduler.options import WorkerOptions
from scheduler.worker import Worker


class DecodeWorker(Worker):
    """A worker in the decode role."""

    def __init__(self, options: WorkerOptions, resolve_directory: Callable[[], str] | None = None) -> None:
        """See Worker. `resolve_directory` finds a directory that may move; default: `options.directory`."""
        super().__init__(options, DecodeHalf, resolve_directory)
