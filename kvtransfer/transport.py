"""What every backend implements: SenderTransport on the prefill side, ReceiverTransport on the decode side.

In all backends a write happens under a *grant*. The sender asks the receiver for it, for one room, epoch and
set of pages, and gives it back when the bytes have landed or certainly will not. So the receiver always knows
which rooms can still be written to, and can close a room without its sender unless a write is in progress
(docs/decisions/0004-fences.md).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.pages import PageWrite
from wire.messages.transfer import TransferEndpoint


@dataclass(frozen=True)
class Bounds:
    """Time limits on a peer, in seconds."""

    connect_s: float = 2.0
    greeting_s: float = 2.0  # from a connection's begin to the proof of the token
    silence_s: float = 10.0  # without a byte or an answer
    write_s: float = 120.0  # for one whole write


class Fence:
    """Passes, for good, when nothing of a closed room and epoch can land any more."""

    def __init__(self) -> None:
        self._event = threading.Event()

    @property
    def passed(self) -> bool:
        """Whether the room's pages may be reused."""
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for it, at most `timeout_s`; returns `passed`."""
        return self._event.wait(timeout_s)

    def pass_(self) -> None:
        """Called when the transport knows that no write can land."""
        self._event.set()


@dataclass(frozen=True)
class Landed:
    """What has arrived for a room, as the receiver counts it.

    By KV group: bytes, and pages that are still missing (groups that miss none are left out). `backend` moved
    the last of it; "" when nothing has arrived. `seconds`: how long at least one write was in progress, of
    those that are over.
    """

    nbytes: Mapping[str, int]
    missing: Mapping[str, int]
    backend: str
    seconds: float

    @property
    def total(self) -> int:
        """Bytes over all groups."""
        return sum(self.nbytes.values())


NOTHING_LANDED = Landed({}, {}, "", 0.0)


class SenderTransport(Protocol):
    """Writes pages of this worker's pools into other workers' pools. Safe to call from several threads."""

    def write(self, endpoint: TransferEndpoint, write: PageWrite) -> int:
        """Copy the pages and return the bytes, all of which have landed. Blocks for at most the time limits.
        Raises TransferError."""

    def suspend(self, endpoint: TransferEndpoint) -> None:
        """This peer is down: until `resume`, writes to it fail at once, those that wait for it too. A write
        that is in the hands of a library (Mooncake's) ends when that lets it go."""

    def resume(self, endpoint: TransferEndpoint) -> None:
        """This peer is up again."""

    def drain(self, endpoint: TransferEndpoint) -> None:
        """Drop the connections and mappings to this peer, when writes in progress are over."""

    def close(self) -> None:
        """Drain every peer. Later writes fail."""


class ReceiverTransport(Protocol):
    """One backend's way into this worker's pools. It grants writes from the RoomTable it was built with."""

    @property
    def endpoint(self) -> TransferEndpoint:
        """How to reach it. It contains a token, so only members of the cluster may see it."""

    def close(self) -> None:
        """Stop listening and drop every peer. A grant may remain unfinished: as long as a peer of shm or RDMA
        runs, the memory must exist."""
