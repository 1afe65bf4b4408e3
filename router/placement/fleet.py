"""Fleet: all live workers of the model, with a load estimate of each.

The estimates (load_estimate.py) are the truth; the arrays of the table (fleet_table.py) follow them.
"""

from __future__ import annotations

from collections.abc import Callable

from router.index.global_index import GlobalIndex
from router.placement.fleet_table import FleetTable, WorkerArrays
from router.placement.load_estimate import AssignedLoad, WorkerLoadEstimate
from wire.records import WorkerRecord


class Fleet:
    """Live workers by id. Belongs to one thread."""

    def __init__(
        self, index: GlobalIndex, on_assigned: Callable[[WorkerLoadEstimate], None] = lambda _: None
    ) -> None:
        """`on_assigned` is called after the `own` load of a live worker has changed."""
        self.changes = 0  # how often the workers that take new work have changed
        self._on_assigned = on_assigned
        self._index = index
        self._estimates: dict[str, WorkerLoadEstimate] = {}
        self._suspected: frozenset[str] = frozenset()
        self._active: list[WorkerLoadEstimate] = []
        self._table = FleetTable([], index)

    def __contains__(self, worker: str) -> bool:
        return worker in self._estimates

    def estimate(self, worker: str) -> WorkerLoadEstimate | None:
        """A live worker's estimate. Call `own_changed` after you have changed its `own` load."""
        return self._estimates.get(worker)

    def estimates(self) -> list[WorkerLoadEstimate]:
        """The estimates of all live workers."""
        return list(self._estimates.values())

    def active(self) -> list[WorkerLoadEstimate]:
        """The estimates of the workers that take new work: neither draining nor suspected."""
        return self._active

    def update(self, records: list[WorkerRecord], now: float) -> list[str]:
        """Take a new View. Workers that stay keep their estimate; a new incarnation starts with an empty one.

        Returns the ids of workers that are gone or have a new incarnation, sorted.
        """
        before, self._estimates = self._estimates, {}
        gone, same, assigned = set(before), len(before) == len(records), []
        for record in records:
            estimate = before.get(record.id)
            if estimate is None or estimate.record.incarnation != record.incarnation:
                estimate, same = WorkerLoadEstimate(record, now), False
            else:
                gone.remove(record.id)
                same = same and estimate.record.draining == record.draining
                if estimate.report(record, now):
                    assigned.append(estimate)
            self._estimates[record.id] = estimate
        if same:
            for estimate in self._estimates.values():
                if estimate.record.id in self._table:  # a draining or suspected worker is not
                    self._table.reported(estimate)
        else:
            self.changes += 1
            self._rebuild()
        for estimate in assigned:
            self.own_changed(estimate)
        return sorted(gone)

    def suspect(self, workers: frozenset[str]) -> None:
        """These, and no others, get no new work until the next call, as if they were draining."""
        if workers != self._suspected:
            self._suspected = workers
            self.changes += 1
            self._rebuild()

    def own_changed(self, estimate: WorkerLoadEstimate) -> None:
        """The load that this router has assigned to a worker has changed. Ignored if the worker has left."""
        if self._estimates.get(estimate.record.id) is estimate:
            self._rewrite(estimate)
            self._on_assigned(estimate)

    def set_peers(self, estimate: WorkerLoadEstimate, load: AssignedLoad) -> None:
        """The other routers together have assigned this load to a live worker."""
        estimate.peers = load
        self._rewrite(estimate)

    def candidates(
        self, now: float, avoid: frozenset[str] = frozenset()
    ) -> tuple[WorkerArrays, WorkerArrays]:
        """Prefill and decode workers that take new work.

        Decode workers to avoid are among them only if there are no others; prefill workers to avoid never:
        a decode worker can do without any.
        """
        if self._table.index_version != self._index.version:
            self._rebuild()
        prefill, decode = self._table.project(now)
        if not avoid:
            return prefill, decode
        others = decode.without(avoid)
        return prefill.without(avoid), others if len(others) else decode

    def _rewrite(self, estimate: WorkerLoadEstimate) -> None:
        if estimate.record.id in self._table:  # a draining or suspected worker is not
            self._table.assigned(estimate)

    def _rebuild(self) -> None:
        for name in self._estimates:
            self._index.join(name)  # before the table notes the index's version
        self._active = [
            one
            for name, one in self._estimates.items()
            if not one.record.draining and name not in self._suspected
        ]
        self._table = FleetTable(self._active, self._index)
