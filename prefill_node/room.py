"""PrefillRoom: a room on its prefill worker."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvtransfer.sender import KVSender
from wire.request import TokenLogprobs
from worker.role import Room


class PrefillHold(StrEnum):
    """Who holds the request."""

    SCHEDULER = "scheduler"  # it waits for its prefill, or is in it
    HAND_OFF = "hand_off"  # prefilled, perhaps parked since; its pages stay until they have landed
    PARKED = "parked"  # prefilled before decode said where to; holds nothing unevictable


@dataclass(slots=True)
class PrefillRoom(Room):
    """`sender` is set when decode has said where the pages go."""

    decode: str  # mailbox address of the decode worker
    hold: PrefillHold = PrefillHold.SCHEDULER
    sender: KVSender | None = None
    looked_below: bool = False  # what of its prompt is on the host has been sent from there
    first_token: int | None = None
    first_logprobs: TokenLogprobs | None = None

    @property
    def peers(self) -> tuple[str, ...]:
        return (self.router, self.decode)

    def stop_sending(self) -> None:
        """Send nothing more of the room.

        A write in progress may go on to read pages that are freed meanwhile. That is harmless: what it reads
        lands, if at all, in pages of a room that decode will never commit without a KVDone.
        """
        if self.sender is not None:
            self.sender.abort("the room was aborted")
