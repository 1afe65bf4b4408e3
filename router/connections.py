"""BoundedHttp: HTTP/1.1 connections whose number, heads and waits are bounded.

uvicorn has no bound on the size of a head, and waits without end for the first request of a connection, for
the rest of a head, and for the rest of a body that nobody reads any more.
"""

from __future__ import annotations

import asyncio
import http
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from common.descriptors import allow_descriptors
from common.errors import ConfigError
from router.request_parser import RequestParser
from router.tls import Tls

# Longer than clients and proxies keep an idle connection: httpx, and so OpenAI's client, 5 s; most others
# 60 at most. With uvicorn's own 5 s a request may be lost on a connection that is just being closed.
_KEEP_ALIVE_S = 75
_GRACE_S = 5  # for connections to end after a signal
_RETRY_AFTER_S = 1  # connections come and go
_LINGER_S = 1.0  # a refused client may take this long to read why
_WORKER_FILES = 16_000  # descriptors for a thousand workers: their events and mailboxes have about 14 each
_OTHER_FILES = 256  # for all but clients and workers


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds of one listener."""

    connections: int  # at once; one more is told 503
    head_bytes: int  # request line and headers; beyond: 431
    head_s: float  # for a connection to send a head; then 408


class HttpConfig(uvicorn.Config):
    """How every HTTP listener of a router is served."""

    def __init__(self, app: Any, limits: ConnectionLimits, tls: Tls | None) -> None:
        """`app` is an ASGI application. Without `tls` it is served in the clear."""
        super().__init__(
            app,
            http=BoundedHttp,
            loop="uvloop",
            lifespan="off",
            ws="none",
            log_level="error",  # a warning for each malformed request would let strangers fill the log
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,  # the client's address is not used
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_S,
        )
        self.limits = limits
        self.tls = tls

    def load(self) -> None:
        """Called once, by the server. uvicorn's own way to TLS reads a certificate only here."""
        super().load()
        if self.tls is not None:
            self.ssl = self.tls.context


class HttpServer(uvicorn.Server):
    """Serves until `should_exit`. Signals are the program's."""

    def __init__(self, config: HttpConfig) -> None:
        super().__init__(config)
        self._tls = config.tls

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn would take them, and raise them again at the end."""
        yield

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second. True ends the server."""
        if self._tls is not None:
            self._tls.tick()
        return await super().on_tick(counter)


class _HeadTooLarge(Exception):
    """Ends parsing."""


class BoundedHttp(HttpToolsProtocol):
    """One connection. uvicorn makes it; uvicorn, the event loop and the parser call its methods."""

    def __init__(
        self,
        config: HttpConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.parser = RequestParser(self)  # type: ignore[assignment]
        self._limits = config.limits
        self._refused = False
        self._in_head = False
        self._received = 0  # bytes of this head that came after its first piece
        self._parsed = 0  # bytes of its request line and whole headers
        self._head_due: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request, or refuse the connection."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            self._refuse(503, "this server has too many connections", "service_unavailable")
            self.transport.close()
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        self._stop_waiting()
        self._end_requests()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """The client will send nothing more: the connection is closed, perhaps before the next answer."""
        self._end_requests()

    def data_received(self, data: bytes) -> None:
        """Parse."""
        if self._refused:
            return
        if self._in_head:  # the parser keeps a header to itself until it is whole
            self._received += len(data)
        super().data_received(data)
        if self._in_head and self._received > self._limits.head_bytes:
            self._refuse_head()
        elif self._head_due is None and self._idle:
            self._await_head()  # also when this was a piece of a body that nobody reads

    def on_message_begin(self) -> None:
        """The first byte of a head."""
        self._in_head, self._received, self._parsed = True, 0, 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The end of a head."""
        self._in_head = False
        self._stop_waiting()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """A head of which a part is there must come to its end soon. Otherwise the client may be idle."""
        super().on_response_complete()
        if self._in_head and self._head_due is None:
            self._await_head()

    def send_400_response(self, msg: str) -> None:
        """Say why a request was not parsed, in OpenAI's form. uvicorn would send plain text."""
        if self._parsed > self._limits.head_bytes:
            self._refuse_head()
        else:
            self._refuse(400, msg)

    @property
    def _idle(self) -> bool:
        """No request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def _end_requests(self) -> None:
        """Tell the request that is being answered that its client is gone; those behind it never begin.

        uvicorn tells the last of them only: the first would go on, and fail when it writes.
        """
        self.pipeline.clear()
        cycle = self._answering
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    def _count(self, size: int) -> None:
        self._parsed += size
        if self._parsed > self._limits.head_bytes:
            raise _HeadTooLarge  # the parser passes it on as one of its errors

    def _await_head(self) -> None:
        if not self._refused:
            self._head_due = self.loop.call_later(self._limits.head_s, self._head_late)

    def _stop_waiting(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None

    def _head_late(self) -> None:
        self._head_due = None
        if self._in_head:
            self._refuse(408, f"the head of a request was not complete after {self._limits.head_s:g} s")
        else:
            self.transport.close()

    def _refuse_head(self) -> None:
        self._refuse(431, f"the head of a request has at most {self._limits.head_bytes} bytes")

    def _refuse(self, status: int, message: str, kind: str = "invalid_request_error") -> None:
        """Answer, and end the connection, when the client has read that or a moment later.

        To close at once would reset the connection while the client still sends, and it might never read why.
        """
        if self._refused:
            return
        self._refused = True
        self._stop_waiting()
        self.connections.discard(self)  # uvicorn's set; it waits for those at the end
        if not self._idle or self.transport.is_closing():  # not amid an answer
            self._end_requests()
            self.transport.close()
            return
        error = {"message": message, "type": kind, "param": None, "code": None}
        body = msgspec.json.encode({"error": error})
        retry = f"retry-after: {_RETRY_AFTER_S}\r\n" if status == 503 else ""
        head = (
            f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n{retry}connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(_LINGER_S, self.transport.abort)
        else:  # TLS
            self.transport.close()


def possible_connections(wanted: int) -> int:
    """How many connections this process has descriptors for, at most `wanted`. Raises its soft limit.

    If there are not enough for clients and a thousand workers, half are for clients. Raises ConfigError when
    there are hardly any.
    """
    soft = allow_descriptors(wanted + _WORKER_FILES + _OTHER_FILES)
    free = soft - _OTHER_FILES
    if free <= 0:
        raise ConfigError("ulimit", f"{soft} open files are too few", f"allow more than {_OTHER_FILES}")
    return min(wanted, max(free - _WORKER_FILES, (free + 1) // 2))
