"""Hold: something that one process keeps for another, as /debug/leases shows it."""

from __future__ import annotations

import msgspec


class Hold(msgspec.Struct, frozen=True):
    """`holder` keeps `what` for `owner` (a mailbox or a client), until the owner is done with it.

    After `deadline_s` more seconds the holder gives it up by itself. None: it keeps it as long as the owner
    is up, or as long as the owner may still write to it.
    """

    holder: str
    what: str
    owner: str
    room: int | None = None
    epoch: int | None = None
    age_s: float | None = None  # None: not known
    deadline_s: float | None = None


class HoldReport(msgspec.Struct, frozen=True):
    """What a process holds, and how often it has given something up at its deadline, by kind."""

    holds: list[Hold]
    swept: dict[str, int]
