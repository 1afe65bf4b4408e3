"""FleetTable: the load estimates of all workers as arrays, so that a policy prices a thousand in a few calls.

A worker has one column. Prefill workers come first, so that each role is one slice of every array. When a
worker's estimate changes, its column is rewritten and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from router.index.global_index import GlobalIndex
from router.placement.load_estimate import WorkerLoadEstimate
from wire.records import Role

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class WorkerArrays:
    """Workers of one role that take new work. Arrays have one entry per worker.

    They are views of the table's arrays: the next `FleetTable.project` and each change of an estimate show in
    them.
    """

    estimates: list[WorkerLoadEstimate]
    names: list[str]
    slots: Integers  # the worker's column in the index's matches
    queued: Floats  # prefill tokens ahead of a new prompt
    requests: Floats  # requests that run on the worker, or wait to
    context: Floats  # KV tokens that requests hold, or will hold
    spare: Floats  # KV tokens that they leave; negative when more is assigned than fits

    def __len__(self) -> int:
        return len(self.names)

    def row(self, worker: str | None) -> int | None:
        """The row of that worker, or None if it is not here."""
        return self.names.index(worker) if worker is not None and worker in self.names else None

    def without(self, avoid: frozenset[str]) -> WorkerArrays:
        """The workers that are not in `avoid`."""
        kept = [row for row, name in enumerate(self.names) if name not in avoid]
        if len(kept) == len(self):
            return self
        return WorkerArrays(
            [self.estimates[row] for row in kept],
            [self.names[row] for row in kept],
            self.slots[kept],
            self.queued[kept], self.requests[kept], self.context[kept], self.spare[kept],
        )  # fmt: skip


class FleetTable:
    """The arrays of one set of workers. A worker that joins or leaves needs a new table."""

    def __init__(self, estimates: Sequence[WorkerLoadEstimate], index: GlobalIndex) -> None:
        """Every worker has joined `index`."""
        estimates = sorted(estimates, key=lambda one: one.record.role is Role.DECODE)
        self.index_version = index.version
        self._rows = {one.record.id: row for row, one in enumerate(estimates)}
        slots = np.array([index.join(name) for name in self._rows], np.int64)
        # A reported queue is base - rate * now, at least 0.
        self._base, self._rate, self._since, self._queued, self._requests, self._context, self._spare = (
            np.zeros((7, len(estimates)))
        )
        for one in estimates:
            self.reported(one)
        names, split = list(self._rows), sum(one.record.role is Role.PREFILL for one in estimates)

        def arrays(part: slice) -> WorkerArrays:
            return WorkerArrays(
                estimates[part], names[part], slots[part],
                self._queued[part], self._requests[part], self._context[part], self._spare[part],
            )  # fmt: skip

        self._prefill, self._decode = arrays(slice(split)), arrays(slice(split, None))

    def __contains__(self, worker: str) -> bool:
        return worker in self._rows

    def reported(self, estimate: WorkerLoadEstimate) -> None:
        """Rewrite a worker's column after a report."""
        row, load = self._rows[estimate.record.id], estimate.record.load
        rate = load.prefill_tokens_per_s
        self._base[row] = load.queued_prefill_tokens + rate * estimate.reported_at
        self._rate[row] = rate
        self.assigned(estimate)

    def assigned(self, estimate: WorkerLoadEstimate) -> None:
        """Rewrite what depends on the load that routers have assigned to a worker."""
        row, context = self._rows[estimate.record.id], estimate.context()
        self._since[row] = estimate.own.since_tokens + estimate.peers.since_tokens
        self._requests[row] = estimate.requests()
        self._context[row] = context
        self._spare[row] = estimate.record.total_tokens - context

    def project(self, now: float) -> tuple[WorkerArrays, WorkerArrays]:
        """Prefill and decode workers, with their queues as they are expected to be now."""
        queued = self._queued
        np.multiply(self._rate, now, out=queued)
        np.subtract(self._base, queued, out=queued)
        np.maximum(queued, 0.0, out=queued)
        np.add(queued, self._since, out=queued)
        return self._prefill, self._decode
