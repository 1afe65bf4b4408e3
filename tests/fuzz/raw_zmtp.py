"""Bytes at the ports of ZeroMQ sockets that are not ZMTP, or that break its rules (RFC 37/ZMTP 3.1)."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from contextlib import suppress

from tests.fuzz.findings import Findings
from wire.addresses import parse_address

_KEPT = 40  # connections that stay open at once
_TIMEOUT_S = 5.0
_COMMAND, _LONG, _MORE = 0x04, 0x02, 0x01
_NAMES = (
    b"READY",
    b"HELLO",
    b"INITIATE",
    b"ERROR",
    b"PING",
    b"PONG",
    b"SUBSCRIBE",
    b"CANCEL",
    b"",
    b"x" * 255,
)


def knock_with_garbage(addresses: list[str], count: int, draw: random.Random, findings: Findings) -> None:
    """Open `count` connections to these in turn, and say something wrong on each."""
    kept: list[socket.socket] = []
    for number in range(count):
        host, port = (
            parse_address(addresses[number % len(addresses)]).endpoint.removeprefix("tcp://").rsplit(":", 1)
        )
        sock = socket.create_connection((host, int(port)), timeout=_TIMEOUT_S)
        kept.append(sock)
        with suppress(OSError):  # it may hang up at any byte
            sock.sendall(draw.choice(_BEHAVIOURS)(draw))
            if draw.random() < 0.3:
                sock.shutdown(socket.SHUT_WR)
        findings.frames += 1
        while len(kept) > _KEPT:
            kept.pop(0).close()
    for sock in kept:
        sock.close()


def _greeting(mechanism: bytes, version: bytes = b"\x03\x01", as_server: int = 0) -> bytes:
    return (
        b"\xff"
        + bytes(8)
        + b"\x7f"
        + version
        + mechanism.ljust(20, b"\0")[:20]
        + bytes((as_server,))
        + bytes(31)
    )


def _frame(flags: int, body: bytes, announced: int | None = None) -> bytes:
    length = len(body) if announced is None else announced
    if length > 255 or flags & _LONG:
        return bytes((flags | _LONG,)) + (length & (2**64 - 1)).to_bytes(8, "big") + body
    return bytes((flags, length)) + body


def _command(draw: random.Random) -> bytes:
    name = draw.choice(_NAMES)
    body = bytes((len(name),)) + name + draw.randbytes(draw.choice((0, 1, 8, 200, 900)))
    return _frame(draw.choice((_COMMAND, _COMMAND, _COMMAND | _MORE)), body)


def _ready(draw: random.Random) -> bytes:
    kind = draw.choice((b"PUSH", b"PULL", b"DEALER", b"SUB", b"XSUB", b"ROUTER", b"nothing", b""))
    metadata = b"\x0bSocket-Type" + draw.choice((len(kind), 2**31, 2**32 - 1)).to_bytes(4, "big") + kind
    return _frame(_COMMAND, b"\x05READY" + metadata * draw.choice((1, 1, 50)))


def _noise(draw: random.Random) -> bytes:
    return draw.randbytes(draw.choice((1, 10, 64, 5000)))


def _half_a_greeting(draw: random.Random) -> bytes:
    return _greeting(b"NULL")[: draw.randrange(64)]


def _other_greetings(draw: random.Random) -> bytes:
    mechanism = draw.choice((b"PLAIN", b"GSSAPI", b"CURVE", b"NULL", draw.randbytes(20)))
    return _greeting(mechanism, draw.randbytes(2), draw.randrange(256)) + _noise(draw)


def _commands(draw: random.Random) -> bytes:
    opening = _greeting(draw.choice((b"NULL", b"CURVE", b"CURVE")))
    return opening + b"".join(_command(draw) for _ in range(draw.randrange(1, 5)))


def _after_the_handshake(draw: random.Random) -> bytes:
    """A handshake without security, and then lengths that are not kept."""
    announced = draw.choice((None, 0, 2**16, 2**31, 2**62, 2**63, 2**64 - 1))
    frame = _frame(draw.choice((0, _LONG, _MORE, _MORE | _LONG, 0x80, 0xFF)), _noise(draw), announced)
    return _greeting(b"NULL") + _ready(draw) + frame


def _http(_draw: random.Random) -> bytes:
    return b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


_BEHAVIOURS: tuple[Callable[[random.Random], bytes], ...] = (
    _noise, _half_a_greeting, _other_greetings, _commands, _after_the_handshake, _http,
)  # fmt: skip
