"""Reads the messages of a ZeroMQ connection, as they are on TCP (ZMTP 3, without CURVE)."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from wire.senders import MARK_BYTES

GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4


class Unit(NamedTuple):
    """What is dropped, doubled or delayed as a whole: all frames of a message, or one command."""

    data: bytes  # as on the wire
    payload: bytes  # of the last frame
    is_command: bool  # a handshake's or a heartbeat's; not a message


async def read_unit(reader: asyncio.StreamReader) -> Unit:
    """The next message or command. Raises asyncio.IncompleteReadError when the connection has ended."""
    data = b""
    while True:
        flags = await reader.readexactly(1)
        size = await reader.readexactly(8 if flags[0] & _LONG else 1)
        payload = await reader.readexactly(int.from_bytes(size, "big"))
        data += flags + size + payload
        if not flags[0] & _MORE:
            return Unit(data, payload, bool(flags[0] & _COMMAND))


def messages_in(frame: bytes) -> int:
    """How many of our messages a mailbox's frame holds (wire/sockets.py); 1 for any other payload."""
    at, found = (frame[0] + 1 if frame else 1) + MARK_BYTES, 0
    while at < len(frame):
        at += 4 + int.from_bytes(frame[at : at + 4], "little")
        found += 1
    return found if found and at == len(frame) else 1
