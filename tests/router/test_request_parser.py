"""A client offers another protocol, as Java's HttpClient does: it is answered as if it had not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from uvicorn.server import ServerState

from router.connections import BoundedHttp, ConnectionLimits, HttpConfig

OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
SIZED = b"POST /sized HTTP/1.1\r\nhost: x\r\n" + OFFER + b"content-length: 5\r\n\r\nhello"
CHUNKS = b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
CHUNKED = b"POST /chunked HTTP/1.1\r\n" + OFFER + b"transfer-encoding: chunked\r\n\r\n" + CHUNKS
EMPTY = b"GET /empty HTTP/1.1\r\n" + OFFER + b"\r\n"
PLAIN = b"POST /plain HTTP/1.1\r\ncontent-length: 3\r\n\r\nxyz"
ALL = {"/sized": b"hello", "/chunked": b"abcde", "/empty": b"", "/plain": b"xyz"}


class Transport(asyncio.Transport):
    """Takes all that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def answered(pieces: list[bytes]) -> tuple[dict[str, bytes], bytes]:
    """The bodies that an application is given by path, and what is written."""
    bodies: dict[str, bytes] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = {"more_body": True, "body": b""}
        body = b""
        while message["more_body"]:
            message = await receive()
            body += message["body"]
        bodies[scope["path"]] = body
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    config = HttpConfig(app, ConnectionLimits(8, 4096, 60.0), None)
    config.load()
    connection, transport = BoundedHttp(config, ServerState(), {}), Transport()
    connection.connection_made(transport)
    for piece in pieces:
        connection.data_received(piece)
        await asyncio.sleep(0)
    async with asyncio.timeout(10.0):
        while connection.tasks:
            await asyncio.wait(connection.tasks)
    connection.connection_lost(None)
    return bodies, transport.written


def cuts(sent: bytes) -> Iterator[list[bytes]]:
    yield [sent]
    for at in range(1, len(sent)):
        yield [sent[:at], sent[at:]]


def test_a_request_that_offers_another_protocol_has_its_body_and_the_next_one_follows() -> None:
    async def run() -> None:
        for pieces in cuts(SIZED + CHUNKED + EMPTY + PLAIN):
            bodies, written = await answered(pieces)
            assert bodies == ALL, pieces
            assert written.count(b"HTTP/1.1 204 No Content\r\n") == len(ALL)

    asyncio.run(run())


@pytest.mark.parametrize("wrong", [b"no request\r\n\r\n", SIZED[:-5].replace(b": 5", b": x")])
def test_what_is_wrong_behind_an_offer_is_refused(wrong: bytes) -> None:
    bodies, written = asyncio.run(answered([SIZED, wrong]))
    assert bodies == {"/sized": b"hello"}
    assert b"HTTP/1.1 400 Bad Request\r\n" in written
