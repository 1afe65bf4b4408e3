"""How often a room may start again, why it did, and which workers its next epoch should not get."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from common.errors import BatonError, InvalidRequest, Overloaded, RequestFailed, Unavailable
from wire.messages.rooms import Rejected, RejectKind

_AVOID_S = 60.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


class RestartCause(StrEnum):
    """Why an epoch ended before its room. Rejections have their own names (wire/messages/rooms.py)."""

    GONE = "gone"  # a worker was lost, or is suspected of it
    SILENT = "silent"  # a worker acknowledged none of the repeats of a message
    DRAINING = "draining"  # a worker leaves, and gave the room back
    MOVED = "moved"  # to a worker that is not known any more
    LINK = "link"  # one worker did not get through to the other, and the router hears both
    OVERLOADED = "overloaded"  # a worker refused the room
    FAILED = "failed"  # the engine or the transfer failed
    FAILED_ALONE = "failed_alone"  # the request failed by itself, for the first time
    UNKNOWN = "unknown"  # a worker does not know the room

    @property
    def is_charged(self) -> bool:
        """Whether the request may be what makes its workers fail, so that the restart counts."""
        return self not in (RestartCause.DRAINING, RestartCause.MOVED, RestartCause.LINK)


class RestartBudget:
    """The restarts of a room since its last new token. Waiting for a worker costs none."""

    def __init__(self, most: int) -> None:
        """At most `most` restarts that count may follow each other without a new token."""
        self._most = most
        self._charged = 0
        self._tries = 0

    def progress(self) -> None:
        """A new token came: the budget is whole again."""
        self._charged = self._tries = 0

    def spend(self, cause: RestartCause) -> float | None:
        """Take one restart. Returns the seconds to pause before it; None when there are none left."""
        self._charged += cause.is_charged
        if self._charged > self._most:
            return None
        self._tries += 1
        if self._tries == 1:
            return 0.0
        return min(_FIRST_PAUSE_S * 2.0 ** (self._tries - 2), _LONGEST_PAUSE_S)

    def exhausted(self, last: BatonError) -> BatonError:
        """What the client is told when there are none left."""
        if not isinstance(last, Unavailable):
            return last
        return Unavailable(f"{last}; before that, {self._tries} restarts brought no new token")


class _Avoided(NamedTuple):
    until: float
    because_of: str  # the other worker of a broken pair; "": the worker itself failed


class AvoidedWorkers:
    """Workers that failed the room. Each is forgotten after a minute: a room never runs out of them."""

    def __init__(self) -> None:
        self._avoided: dict[str, _Avoided] = {}

    def add(self, worker: str, now: float, because_of: str = "") -> None:
        """Avoid a worker from now on, perhaps only because it does not get through to another."""
        self._avoided[worker] = _Avoided(now + _AVOID_S, because_of)

    def gone(self, worker: str) -> None:
        """A worker is gone: then it was no fault of others that they did not get through to it."""
        for name in [name for name, one in self._avoided.items() if one.because_of == worker]:
            del self._avoided[name]

    def names(self, now: float) -> frozenset[str]:
        """Who is avoided now."""
        for name in [name for name, one in self._avoided.items() if now >= one.until]:
            del self._avoided[name]
        return frozenset(self._avoided)


def rejection_error(worker: str, message: Rejected, retry_after_s: float) -> BatonError:
    """What the client is told if the room fails with this rejection. `retry_after_s` where it says none."""
    match message.why:
        case RejectKind.INVALID:
            return InvalidRequest(message.message)
        case RejectKind.OVERLOADED:
            return Overloaded(message.message, message.retry_after_s or retry_after_s, "worker")
        case RejectKind.FAILED_ALONE:
            return RequestFailed(f"worker {worker}: {message.message}")
    return Unavailable(f"worker {worker}: {message.message}")
