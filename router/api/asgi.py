"""HTTP on ASGI, as far as the router needs it.

A framework's routing, task groups and streaming responses cost more per request than tokenising the prompt.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from common.errors import InvalidRequest
from router.api.content import UnpackedContent, check_type
from router.keys import Key
from router.request_lines import Generated
from router.streams.client_holds import ClientHolds
from router.streams.generation import Generation
from router.tracing import RequestSpan

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

JSON: tuple[bytes, bytes] = (b"content-type", b"application/json")
_SSE: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_LONGEST_ID = 128
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class ClientLeft(Exception):
    """The connection closed before the request was complete."""


class HttpRequest:
    """One request and the way to answer it."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, clients: ClientHolds, max_body_bytes: int
    ) -> None:
        self.method: str = scope["method"]
        root: str = scope.get("root_path", "")
        path: str = scope["path"]
        self.path = path[len(root) :] if root and path.startswith(root) else path
        self._scope = scope
        self._receive = receive
        self._send = send
        self._clients = clients
        self._max_body_bytes = max_body_bytes
        self.arrived_ns = time.time_ns()
        self.request_id = self._request_id()
        self.key: Key | None = None  # that the client has shown, if this door has keys
        self.status = 0  # of the answer, once it has begun
        self.further_headers: Headers = []  # of any answer
        self.generated: Generated | None = None  # what it has come to, if lines are written of requests
        self.error = ""  # the name of what ended it
        self.span: RequestSpan | None = None  # of the request's trace, if it has one

    def header(self, name: bytes) -> str | None:
        """A header's value, or None. `name` is in lower case."""
        for key, value in self._scope["headers"]:
            if key == name:
                return bytes(value).decode("latin-1")
        return None

    def headers(self) -> dict[str, str]:
        """All headers by name, in lower case; of a repeated one the last."""
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in self._scope["headers"]}

    def accepts_events(self) -> bool:
        """Whether the client says that it knows server-sent events."""
        return "text/event-stream" in (self.header(b"accept") or "").lower()

    def query(self) -> dict[str, str]:
        """The query string's pairs."""
        return dict(parse_qsl(self._scope.get("query_string", b"").decode("latin-1")))

    async def json(self) -> dict[str, Any]:
        """The body, a JSON object. Raises InvalidRequest, UnsupportedMedia, BodyTooLarge, LateBody, or
        ClientLeft."""
        check_type(self.header(b"content-type"))
        content = UnpackedContent(self.header(b"content-encoding"), self._max_body_bytes)
        announced = self.header(b"content-length")
        if announced is not None and announced.isdecimal():
            content.expect(int(announced))
        async with self._clients.reading(self.request_id):
            raw = await self._read(content)
        try:
            decoded = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            half = "; it has a lone surrogate, half of a character" if _SURROGATE.search(raw) else ""
            raise InvalidRequest(f"the body is not JSON: {error}{half}") from None
        except RecursionError:
            raise InvalidRequest("the body nests too deep") from None
        if not isinstance(decoded, dict):
            raise InvalidRequest("the body is not a JSON object")
        return decoded

    async def respond(self, status: int, body: bytes, headers: Headers) -> None:
        """Send the whole answer."""
        self.status = status
        own = [(b"content-length", str(len(body)).encode()), self._id_header()]
        headers = [*headers, *self.further_headers, *own]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def respond_json(self, body: Any, status: int = 200, headers: Headers | None = None) -> None:
        """Send the whole answer as JSON."""
        await self.respond(status, msgspec.json.encode(body), [JSON, *(headers or [])])

    async def begin_sse(self) -> None:
        """Send the head of a stream."""
        self.status = 200
        await self._send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [*_SSE, *self.further_headers, self._id_header()],
            }
        )

    async def send_sse(self, events: bytes, more: bool = True) -> None:
        """Send whole events of a stream."""
        await self._send({"type": "http.response.body", "body": events, "more_body": more})

    def watch(self, generation: Generation) -> asyncio.Task[None]:
        """Cancel the generation when the client goes. Cancel the task when the answer is out."""
        return asyncio.create_task(self._watch(generation))

    async def _watch(self, generation: Generation) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        generation.cancel()

    async def _read(self, content: UnpackedContent) -> bytes:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            content.add(message.get("body", b""))
            if not message.get("more_body", False):
                return content.whole()

    def _request_id(self) -> str:
        given = self.header(b"x-request-id")
        if given and len(given) <= _LONGEST_ID and given.isascii() and given.isprintable():
            return given
        return f"{random.getrandbits(96):024x}"  # no secret: os.urandom costs 50 us

    def _id_header(self) -> tuple[bytes, bytes]:
        return b"x-request-id", self.request_id.encode()
