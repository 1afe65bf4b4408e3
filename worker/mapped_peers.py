"""MappedPeers: decode workers that pages were sent to: a pool does not stay mapped after its owner left.

A worker does not watch the directory; a decode worker that has been sent nothing for a while is let go, gone
or not. One that lives only costs a new connection and a new mapping at its next room.
"""

from __future__ import annotations

from wire.messages.transfer import TransferEndpoint

IDLE_S = 60.0


class MappedPeers:
    """When each endpoint was last used. Engine loop only; time is passed in."""

    def __init__(self) -> None:
        self._last_used: dict[str, tuple[TransferEndpoint, str, float]] = {}

    def used(self, endpoint: TransferEndpoint, mailbox: str, now: float) -> None:
        """A room's pages go there, to the worker at this mailbox address."""
        self._last_used[endpoint.address] = (endpoint, mailbox, now)

    def of(self, mailbox: str) -> list[TransferEndpoint]:
        """The endpoints of the worker at this address."""
        return [endpoint for endpoint, owner, _ in self._last_used.values() if owner == mailbox]

    def take_idle(self, now: float) -> list[TransferEndpoint]:
        """Forget and return those that nothing was sent to for IDLE_S seconds."""
        idle = [endpoint for endpoint, _, at in self._last_used.values() if now - at >= IDLE_S]
        for endpoint in idle:
            del self._last_used[endpoint.address]
        return idle
