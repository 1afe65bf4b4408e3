"""Where a room stands on one side of its transfer."""

from __future__ import annotations

from enum import IntEnum


class KVPoll(IntEnum):
    """States only grow, except that FAILED, the smallest, overrides them all.

    The order lets several ranks of one room agree by taking the minimum.
    """

    FAILED = 0
    BOOTSTRAPPING = 1  # the sender does not know the pages yet
    WAITING_FOR_INPUT = 2  # pages are known; nothing has moved
    TRANSFERRING = 3
    SUCCESS = 4
