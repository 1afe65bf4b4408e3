"""DirectoryClient: the workers of the last View, also while the directory restarts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wire.addresses import is_directory
from wire.messages.any_message import AnyMessage
from wire.messages.directory import View, Watch
from wire.records import WorkerRecord
from wire.settings import NO_SETTINGS, Settings

_WATCH_EVERY_S = 1.0
_SEEN = 256  # incarnations that a Watch carries at most, the highest ones


@dataclass(frozen=True, slots=True)
class ViewChange:
    """What a View has changed. A restarted worker is in `lost` (old record) and in `joined`."""

    joined: list[WorkerRecord]
    lost: list[WorkerRecord]


class DirectoryClient:
    """Watches a directory. Pure but for `send`: time is passed in.

    Every Watch has a number, and a View says which Watch the directory had last. A directory that was started
    again, perhaps at another address and with another clock, answers a later Watch than the one before it: so
    its Views are newer, and what still comes of the earlier one is late. A directory that has just started
    sends no View until its workers have announced themselves: until then the last one holds.
    """

    def __init__(
        self,
        address: str,
        send: Callable[[str, AnyMessage], None],
        admin_url: str = "",
        settings: Callable[[], Settings] = lambda: NO_SETTINGS,
        waiting: Callable[[], dict[str, float]] = dict,
    ) -> None:
        """`admin_url` is announced with every Watch, where it is not "". So are the `settings` of then, and
        the rooms that are `waiting`."""
        self._address = address
        self._send = send
        self._admin_url = admin_url
        self._settings = settings
        self._waiting = waiting
        self._told = NO_SETTINGS  # with the last Watch
        self._number = 0  # of the last Watch
        self._last = (-1, -1)  # watch and version of the last View
        self._next_watch_at = 0.0
        self._seen: dict[str, int] = {}  # worker id -> its highest incarnation
        self.workers: dict[str, WorkerRecord] = {}

    def tick(self, now: float) -> None:
        """Renew the watch when it is due, or when there are other settings to be told."""
        settings = self._settings()
        if now >= self._next_watch_at or settings is not self._told:
            self._next_watch_at = now + _WATCH_EVERY_S
            self._told = settings
            self._number += 1
            watch = Watch(self._number, dict(self._seen), self._admin_url, settings, self._waiting())
            self._send(self._address, watch)

    def move(self, address: str) -> None:
        """The directory has restarted at `address`. The next tick asks there."""
        if address != self._address:
            self._address = address
            self._next_watch_at = 0.0

    def is_from_directory(self, sender: str) -> bool:
        """Whether a View came from the directory that is watched."""
        return is_directory(sender, self._address)

    def take(self, view: View) -> ViewChange:
        """Take a View, and return what changed. One that comes late is ignored."""
        if (view.watch, view.version) < self._last:
            return ViewChange([], [])
        self._last = view.watch, view.version
        before, self.workers = self.workers, {record.id: record for record in view.records}
        change = ViewChange(
            joined=[r for r in view.records if _incarnation(before.get(r.id)) != r.incarnation],
            lost=[r for r in before.values() if _incarnation(self.workers.get(r.id)) != r.incarnation],
        )
        for record in change.joined:
            self._see(record)
        return change

    def _see(self, record: WorkerRecord) -> None:
        self._seen[record.id] = max(record.incarnation, self._seen.get(record.id, 0))
        if len(self._seen) > _SEEN:
            del self._seen[min(self._seen, key=self._seen.__getitem__)]


def _incarnation(record: WorkerRecord | None) -> int | None:
    return None if record is None else record.incarnation
