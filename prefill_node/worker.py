"""The prefill worker: a Worker in the prefill role."""

from __future__ import annotations

from collections.abc import Callable

from prefill_node.role import PrefillRole
from worker.loop import Worker
from worker.options import WorkerOptions


class PrefillWorker(Worker):
    """A worker in the prefill role."""

    def __init__(self, options: WorkerOptions, resolve_directory: Callable[[], str] | None = None) -> None:
        """See Worker."""
        super().__init__(options, PrefillRole, resolve_directory)
