"""DirectoryClient: the workers of the last View, also while the directory restarts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from router.directory.directory import GENERATION_SHIFT
from wire.messages import AnyMessage, View, Watch
from wire.records import WorkerRecord

_WATCH_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class ViewChange:
    """What a View has changed. A restarted worker is in `lost` (old record) and in `joined`."""

    joined: list[WorkerRecord]
    lost: list[WorkerRecord]


class DirectoryClient:
    """Watches a directory. Pure but for `send`: time is passed in.

    A directory that has just restarted knows no worker yet. So when a View's generation changes, records of
    the earlier generation are kept for `grace_s`, in which their workers announce again.
    """

    def __init__(self, address: str, send: Callable[[str, AnyMessage], None], grace_s: float) -> None:
        self._address = address
        self._send = send
        self._grace_s = grace_s
        self._version = -1
        self._keep_until = 0.0
        self._next_watch_at = 0.0
        self.workers: dict[str, WorkerRecord] = {}

    def tick(self, now: float) -> None:
        """Renew the watch when it is due."""
        if now >= self._next_watch_at:
            self._next_watch_at = now + _WATCH_EVERY_S
            self._send(self._address, Watch())

    def move(self, address: str) -> None:
        """The directory has restarted at `address`. The next tick asks there."""
        if address != self._address:
            self._address = address
            self._next_watch_at = 0.0

    def take(self, view: View, now: float) -> ViewChange:
        """Take a View, and return what changed. One that is older than the last is ignored."""
        if view.version < self._version:
            return ViewChange([], [])
        if self._version >= 0 and view.version >> GENERATION_SHIFT != self._version >> GENERATION_SHIFT:
            self._keep_until = now + self._grace_s
        self._version = view.version
        records = {record.id: record for record in view.records}
        if now < self._keep_until:
            records = {**self.workers, **records}
        before, self.workers = self.workers, records
        return ViewChange(
            joined=[r for r in records.values() if _incarnation(before.get(r.id)) != r.incarnation],
            lost=[r for r in before.values() if _incarnation(records.get(r.id)) != r.incarnation],
        )


def _incarnation(record: WorkerRecord | None) -> int | None:
    return None if record is None else record.incarnation
