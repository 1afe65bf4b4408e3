"""Incarnations: which process is the worker of an id. Pure: time is passed in.

Two processes can claim one id: a worker was stopped or cut off, another was started in its place, and the
first wakes up. The one that joined last is the worker. The other, a zombie, is never the worker again
(docs/decisions/0021-incarnations.md).
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from wire.messages.directory import Announce, Join, Joined, Replaced, Withdraw

_REMEMBERED = 100_000  # ids, and joins


@dataclass(frozen=True, slots=True)
class _Newest:
    """The newest process that is known under an id, also when its lease has ended."""

    incarnation: int
    nonce: int | None  # None: a router has told of it
    issued: bool  # by this directory: it is newer than all that an earlier directory has issued
    over: bool = False  # it has withdrawn

    def admits(self, incarnation: int, nonce: int) -> bool:
        """Whether a process that announces itself is this one, or one that is newer."""
        if incarnation == self.incarnation:
            return not self.over and self.nonce in (None, nonce)
        return incarnation > self.incarnation and not self.issued


class Incarnations:
    """Issues numbers, one counter for all workers, and knows the newest process of every id.

    A directory that has been started again knows nothing. It issues no number before `issues_from`, a lease
    after its start. By then the live workers have announced themselves and the routers have told which
    incarnations they have seen, so that what it issues is above all of them.
    """

    def __init__(self, issues_from: float) -> None:
        self.issues_from = issues_from
        self._highest = 0
        self._newest: dict[str, _Newest] = {}
        self._issued: dict[tuple[str, int], int] = {}  # (worker id, nonce) -> incarnation

    def join(self, message: Join, lease_s: float, now: float) -> Joined | Replaced | None:
        """Issue an incarnation; the same nonce gets the same again. None: not yet, the worker asks again."""
        worker, nonce = message.worker, message.nonce
        incarnation = self._issued.get((worker, nonce))
        if incarnation is not None:
            newest = self._newest.get(worker)
            if newest is None or not newest.admits(incarnation, nonce):
                return Replaced(worker, nonce)
        elif now < self.issues_from:
            return None
        else:
            incarnation = self._highest = self._highest + 1
            self._issued[worker, nonce] = incarnation
            self._newest[worker] = _Newest(incarnation, nonce, issued=True)
        return Joined(worker, nonce, incarnation, lease_s)

    def admit(self, message: Announce) -> bool:
        """Whether the process that announces itself is the newest of its id. A zombie is not."""
        record, nonce = message.record, message.nonce
        self._highest = max(self._highest, record.incarnation)
        newest = self._newest.get(record.id)
        if newest is not None and not newest.admits(record.incarnation, nonce):
            return False
        if newest is None or not newest.issued:
            self._newest[record.id] = _Newest(record.incarnation, nonce, issued=False)
        return True

    def withdraw(self, message: Withdraw) -> None:
        """The process has left: what comes late of it is refused."""
        newest = self._newest.get(message.worker)
        if newest is not None and newest.incarnation == message.incarnation:
            self._newest[message.worker] = _Newest(newest.incarnation, newest.nonce, newest.issued, over=True)

    def remember(self, seen: dict[str, int]) -> list[str]:
        """A router has seen these incarnations, by worker id. Returns the ids of which it knew a newer
        process than this directory."""
        newer = []
        for worker, incarnation in seen.items():
            self._highest = max(self._highest, incarnation)
            newest = self._newest.get(worker)
            if newest is None or (incarnation > newest.incarnation and not newest.issued):
                self._newest[worker] = _Newest(incarnation, None, issued=False)
                newer.append(worker)
        return newer

    def forget(self, live: Container[str]) -> None:
        """Bound the memory: drop the oldest ids that are not `live`, and the oldest joins."""
        if len(self._newest) > _REMEMBERED:
            gone = [worker for worker in self._newest if worker not in live]
            for worker in gone[: len(self._newest) - _REMEMBERED]:
                del self._newest[worker]
        for joined in list(self._issued)[: max(0, len(self._issued) - _REMEMBERED)]:
            del self._issued[joined]
