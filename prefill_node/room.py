"""PrefillRoom: a room on its prefill worker."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvtransfer.sender import KVSender
from wire.messages import TokenLogprobs
from worker.role import Room


class PrefillHold(StrEnum):
    """Who has the request."""

    SCHEDULER = "scheduler"  # it waits for, or is in, its prefill
    HAND_OFF = "hand_off"  # prefilled; its pages stay until they have landed
    PARKED = "parked"  # prefilled before decode said where to; holds nothing unevictable


@dataclass(slots=True)
class PrefillRoom(Room):
    """`sender` is there once decode has said where the pages go; `deadline` bounds the wait for that."""

    decode: str  # mailbox address of the decode worker
    deadline: float
    hold: PrefillHold = PrefillHold.SCHEDULER
    sender: KVSender | None = None
    first_token: int | None = None
    first_logprobs: TokenLogprobs | None = None
