"""What every backend offers: SenderTransport on the prefill side, ReceiverTransport on the decode side.

All backends keep one promise: a write happens under a *grant*, asked of the receiver for this room, epoch
and these pages, and given back when the bytes have landed or when it is certain that none will. So the
receiver always knows which rooms can still be written to, and closing a room needs no help from a sender
that has none in progress (docs/decisions/0004-fences.md).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.pages import PageWrite
from wire.messages import TransferEndpoint


@dataclass(frozen=True)
class Bounds:
    """How long a peer may keep us waiting, in seconds."""

    connect_s: float = 5.0
    silence_s: float = 10.0  # no byte and no answer for this long: the transfer failed
    write_s: float = 120.0  # one whole write


class Fence:
    """Passes when nothing of a closed room and epoch can land any more. Never un-passes."""

    def __init__(self) -> None:
        self._event = threading.Event()

    @property
    def passed(self) -> bool:
        """Whether the room's pages may be given to somebody else."""
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for it, at most `timeout_s`; returns `passed`."""
        return self._event.wait(timeout_s)

    def pass_(self) -> None:
        """Called by the transport, once it can prove it."""
        self._event.set()


@dataclass(frozen=True)
class Landed:
    """What has arrived for a room, by the receiver's own count.

    By KV group: bytes, and pages that are still missing (groups that miss none are left out). `backend`
    brought the last of it ("" when there is nothing yet).
    """

    nbytes: Mapping[str, int]
    missing: Mapping[str, int]
    backend: str

    @property
    def total(self) -> int:
        """Bytes over all groups."""
        return sum(self.nbytes.values())


NOTHING_LANDED = Landed({}, {}, "")


class SenderTransport(Protocol):
    """Writes pages of this worker's pools into other workers' pools. Safe to call from several threads."""

    def write(self, endpoint: TransferEndpoint, write: PageWrite) -> int:
        """Copy the pages; returns bytes, all landed. Blocks, bounded. Raises TransferError."""

    def drain(self, endpoint: TransferEndpoint) -> None:
        """The peer is gone or will not be written to: drop connections and mappings when writes are over."""

    def close(self) -> None:
        """Drain every peer; later writes fail."""


class ReceiverTransport(Protocol):
    """One backend's way into this worker's pools. Rooms open and close in the RoomTable that it was given."""

    @property
    def endpoint(self) -> TransferEndpoint:
        """How to reach it; contains a token, so only members of the cluster may see it."""

    def close(self) -> None:
        """Stop listening and drop every peer. A grant that is out may stay out: while a peer of shm or RDMA
        lives, the memory must too."""
