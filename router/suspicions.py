"""Suspicions: which workers this router does not believe to be alive, since when and why.

A suspicion ends all rooms on its worker at once, and no room is placed there before it ends. It is this
router's own: another router may reach the worker. The end of the lease, which the directory decides, stays
the last resort.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from wire.peer_monitors import PeerState
from wire.records import WorkerRecord

_KEPT = 500  # suspicions, for /debug/suspicions
_TURNS_S = 2.0  # an engine loop whose last turn is not older turns


class SuspicionCause(StrEnum):
    """Why a worker is suspected."""

    UNREACHABLE = "unreachable"  # its mailbox answers no heartbeats, or refuses connections
    EXITED = "exited"  # its process on this host has ended
    SILENT = "silent"  # nothing comes from it, though it answers heartbeats and its engine loop turns
    LOST = "lost"  # the directory does not list it any more, though it was not leaving


_WHAT = {
    SuspicionCause.UNREACHABLE: "does not answer heartbeats",
    SuspicionCause.EXITED: "has exited",
    SuspicionCause.SILENT: "answers nothing",
    SuspicionCause.LOST: "was lost",
}
"""What completes the sentence "worker x ..."."""


@dataclass(slots=True)
class Suspicion:
    """One suspicion. Times are of the Unix clock and of the monotonic one."""

    worker: str
    incarnation: int
    cause: SuspicionCause  # the first one
    at_unix: float
    at_monotonic: float
    cleared_at_unix: float | None = None
    causes: set[SuspicionCause] = field(default_factory=set)  # that hold now; with the last one it ends


class SuspicionReport(msgspec.Struct, frozen=True):
    """One suspicion of one router, as /debug/suspicions shows it."""

    router: str  # mailbox of the process that suspected the worker
    worker: str
    incarnation: int
    cause: SuspicionCause
    at_unix: float
    at_monotonic: float
    cleared_at_unix: float | None  # None: it has not ended


class Suspicions:
    """Told what is seen of workers, it tells what follows. Belongs to one event loop."""

    def __init__(
        self,
        on_suspected: Callable[[WorkerRecord, str, float], None],
        on_changed: Callable[[frozenset[str]], None],
    ) -> None:
        """`on_changed` is told who is suspected whenever that changes. Then `on_suspected` is called with a
        worker whose suspicion begins, what completes the sentence "worker x ...", and the time."""
        self.suspected: frozenset[str] = frozenset()  # ids of live workers
        self.history: deque[Suspicion] = deque(maxlen=_KEPT)
        self.counts: Counter[SuspicionCause] = Counter()
        self._on_suspected = on_suspected
        self._on_changed = on_changed
        self._workers: dict[str, WorkerRecord] = {}  # live, by mailbox
        self._current: dict[str, Suspicion] = {}  # by worker id

    def update(self, lost: Iterable[WorkerRecord], workers: Iterable[WorkerRecord], now: float) -> None:
        """Take a change of the directory's view: the records that it does not list any more, and all others.

        `on_suspected` is not called for those that are lost.
        """
        self._workers = {record.mailbox: record for record in workers}
        for record in lost:
            if record.id not in self._current and not record.draining:
                self._begin(record, SuspicionCause.LOST, now)
            if record.id in self._current:
                self._end(record.id)

    def on_peer(self, address: str, state: PeerState, now: float) -> None:
        """A mailbox has come up or gone down."""
        record = self._workers.get(address)
        if record is None:
            return
        if state is PeerState.DOWN:
            self.suspect(record, SuspicionCause.UNREACHABLE, now)
        else:
            self._clear(record.id, SuspicionCause.UNREACHABLE)

    def on_exit(self, record: WorkerRecord, now: float) -> None:
        """A worker's process has ended."""
        self.suspect(record, SuspicionCause.EXITED, now)

    def on_silence(self, silent: Collection[str], now: float) -> None:
        """Take the mailboxes that were asked something long ago and from which nothing has come since."""
        if not silent and not self._current:
            return  # as in nearly every tick
        for record in self._workers.values():
            if record.mailbox not in silent:
                self._clear(record.id, SuspicionCause.SILENT)
            elif record.load.since_turn_s < _TURNS_S:  # else it is slow, or its own watchdog will act
                self.suspect(record, SuspicionCause.SILENT, now)

    def suspect(self, record: WorkerRecord, cause: SuspicionCause, now: float) -> None:
        """There is reason not to believe that a worker is alive."""
        current = self._current.get(record.id)
        if current is not None:
            current.causes.add(cause)
            return
        self._begin(record, cause, now)
        self._tell()
        self._on_suspected(record, _WHAT[cause], now)

    def report(self, router: str) -> list[SuspicionReport]:
        """The last few hundred, oldest first. `router` is the mailbox of this process."""
        return [
            SuspicionReport(
                router, one.worker, one.incarnation, one.cause, one.at_unix, one.at_monotonic,
                one.cleared_at_unix,
            )
            for one in self.history
        ]  # fmt: skip

    def _clear(self, worker: str, cause: SuspicionCause) -> None:
        """One reason is gone. With the last one the suspicion ends."""
        current = self._current.get(worker)
        if current is not None:
            current.causes.discard(cause)
            if not current.causes:
                self._end(worker)

    def _begin(self, record: WorkerRecord, cause: SuspicionCause, now: float) -> None:
        begun = Suspicion(record.id, record.incarnation, cause, time.time(), now)
        begun.causes.add(cause)
        self._current[record.id] = begun
        self.history.append(begun)
        self.counts[cause] += 1

    def _end(self, worker: str) -> None:
        self._current.pop(worker).cleared_at_unix = time.time()
        self._tell()

    def _tell(self) -> None:
        suspected = frozenset(self._current)
        if suspected != self.suspected:
            self.suspected = suspected
            self._on_changed(suspected)
