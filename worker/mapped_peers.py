"""MappedPeers: decode workers that pages are sent to: a pool does not stay mapped after its owner left.

A worker does not watch the directory; a decode worker to which nothing is to be sent for a while is let go,
gone or not. One that lives only costs a new connection and a new mapping at its next room.
"""

from __future__ import annotations

from dataclasses import dataclass

from wire.messages.transfer import TransferEndpoint

IDLE_S = 60.0


@dataclass(slots=True)
class _Mapped:
    endpoint: TransferEndpoint
    mailbox: str
    senders: int = 0  # that may send there still
    used_at: float = 0.0  # when the last of them began or ended


class MappedPeers:
    """Who sends to which endpoint, and since when nobody does. Engine loop only; time is passed in."""

    def __init__(self) -> None:
        self._peers: dict[tuple[str, str], _Mapped] = {}  # by the endpoint's identity

    def opened(self, endpoint: TransferEndpoint, mailbox: str, now: float) -> None:
        """A sender's pages go there, to the worker at this mailbox address, until it is `closed`."""
        peer = self._peers.setdefault(endpoint.identity, _Mapped(endpoint, mailbox))
        peer.senders += 1
        peer.used_at = now

    def closed(self, endpoint: TransferEndpoint, now: float) -> None:
        """One of the endpoint's senders sends nothing more."""
        peer = self._peers[endpoint.identity]
        peer.senders -= 1
        peer.used_at = now

    def of(self, mailbox: str) -> list[TransferEndpoint]:
        """The endpoints of the worker at this address."""
        return [peer.endpoint for peer in self._peers.values() if peer.mailbox == mailbox]

    def take_idle(self, now: float) -> list[TransferEndpoint]:
        """Forget and return those without a sender for IDLE_S seconds."""
        idle = [
            peer.endpoint
            for peer in self._peers.values()
            if not peer.senders and now - peer.used_at >= IDLE_S
        ]
        for endpoint in idle:
            del self._peers[endpoint.identity]
        return idle
