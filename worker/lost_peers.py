"""LostPeers: which reports of a peer that is down are news.

A mailbox reports a peer that is newly watched again. If the peer was down, and has just come up again, it may
have asked for pages (KVTarget, Fetch) before this worker's own connection to it is there: the repeated report
is older than what the peer has said, and must not end what is being written to it.
"""

from __future__ import annotations

from wire.peer_monitors import PeerState

_KEPT_S = 300.0  # a mailbox forgets a peer that stays down, and for which nothing waits, much sooner


class LostPeers:
    """Used by the engine loop only; time is passed in."""

    def __init__(self) -> None:
        self._down: dict[str, float] = {}  # peer -> when it was last reported down; it has not been up since

    def is_down(self, address: str) -> bool:
        """Whether a peer was reported down, not long ago, and has not been up since."""
        return address in self._down

    def is_lost(self, address: str, state: PeerState, now: float) -> bool:
        """A report has come. Whether it says that a peer is down which was not known to be."""
        is_known = self._down.pop(address, None) is not None
        self._down = {peer: since for peer, since in self._down.items() if now - since < _KEPT_S}
        if state is PeerState.UP:
            return False
        self._down[address] = now
        return not is_known
