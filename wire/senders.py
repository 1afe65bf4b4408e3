"""Senders: who sent a frame, by its head and by the key of its connection."""

from __future__ import annotations

from common.errors import WireError
from wire.addresses import parse_address
from wire.security import PROOF_BYTES, Curve

_MOST = 10_000


class Senders:
    """Remembers the heads that it has found to be right, because a proof costs more than all else of a frame.

    A head is one byte with the length of the sender's address, the address, and with CURVE its proof.
    """

    def __init__(self, curve: Curve | None) -> None:
        self._curve = curve
        self._proof_bytes = PROOF_BYTES if curve is not None else 0
        self._known: dict[tuple[bytes, str], str] = {}
        self._version = 0

    def find(self, frame: bytes, key: str) -> tuple[str, int]:
        """The sender's address, and where the messages begin. `key`: of the connection, "" without CURVE.

        Raises WireError for a bad address, and for a sender that has not proven to be a member.
        """
        begin = (frame[0] if frame else 0) + 1 + self._proof_bytes
        head = frame[:begin]
        curve = self._curve
        if curve is not None and curve.version != self._version:
            self._version = curve.version
            self._known.clear()
        sender = self._known.get((head, key))
        if sender is None:
            sender = self._check(head, key)
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[head, key] = sender
        return sender, begin

    def _check(self, head: bytes, key: str) -> str:
        end = len(head) - self._proof_bytes
        if end < 1 or head[0] + 1 != end:
            raise WireError("a frame ends within its head")
        try:
            text = head[1:end].decode("ascii")
        except UnicodeDecodeError:
            raise WireError("the sender's address is not ASCII") from None
        address = parse_address(text)
        if self._curve is not None and not self._curve.is_member(address, text, head[end:], key):
            raise WireError(f"a stranger speaks as {text}")
        return text
