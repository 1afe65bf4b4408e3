"""Senders: who sent a frame, by its head and its connection's key, and whether it is for this process."""

from __future__ import annotations

from common.errors import WireError
from wire.addresses import parse_address
from wire.security import PROOF_BYTES, Curve

MARK_BYTES = PROOF_BYTES
NO_MARK = bytes(MARK_BYTES)

_MOST = 10_000


class Senders:
    """Remembers the heads that it has found to be right, because a proof costs more than all else of a frame.

    A head is one byte with the length of the sender's address, the address, and a mark of 16 bytes: with
    CURVE the sender's proof, without it the mark of the process that the frame is for.
    """

    def __init__(self, curve: Curve | None, own_key: str) -> None:
        """`own_key`: in this process's address; "" at a fixed port."""
        self._curve = curve
        self._own_marks = (NO_MARK, mark_of(own_key))
        self._known: dict[tuple[bytes, str], str] = {}
        self._version = 0

    def find(self, frame: bytes, key: str) -> tuple[str, int]:
        """The sender's address, and where the messages begin. `key`: of the connection, "" without CURVE.

        Raises WireError for a bad address, for a sender that has not proven to be a member, and for a frame
        to a process that had this address before.
        """
        begin = (frame[0] if frame else 0) + 1 + MARK_BYTES
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
        end = len(head) - MARK_BYTES
        if end < 1 or head[0] + 1 != end:
            raise WireError("a frame ends within its head")
        try:
            text = head[1:end].decode("ascii")
        except UnicodeDecodeError:
            raise WireError("the sender's address is not ASCII") from None
        address = parse_address(text)
        if self._curve is None:
            if head[end:] not in self._own_marks:
                raise WireError(f"a frame of {text} is for another process, which had this port before")
        elif not self._curve.is_member(address, text, head[end:], key):
            raise WireError(f"a stranger speaks as {text}")
        return text


def mark_of(key: str) -> bytes:
    """The mark, without CURVE, of the process whose address has that key."""
    return bytes.fromhex(key)[:MARK_BYTES] if key else NO_MARK
