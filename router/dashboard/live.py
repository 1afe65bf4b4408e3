"""LiveFeed: the figures of the fleet as server-sent events, for the dashboard.

One task reads the listener's own pages while anybody listens, however many do. Its window is that of `baton
top`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import msgspec

from common.errors import BatonError
from router.dashboard.figures import Snapshot, parse_samples
from router.dashboard.view import FleetView, fleet_view
from router.page import Page
from router.trace import RequestSummary
from wire.records import WorkerRecord

_INTERVAL_S = 2.0
_WINDOW_S = 30.0  # over which rates and percentiles are taken


class _Workers(msgspec.Struct):
    workers: list[WorkerRecord]


class _Requests(msgspec.Struct):
    requests: list[RequestSummary]


class LiveFeed:
    """Belongs to the event loop of the listener."""

    def __init__(
        self, open_page: Callable[[str], Awaitable[Page]], url: str, interval_s: float = _INTERVAL_S
    ) -> None:
        """`open_page` is asked for /metrics, /debug/workers and /debug/requests. `url` is the listener's."""
        self._open_page = open_page
        self._url = url
        self._interval_s = interval_s
        self._seen: deque[Snapshot] = deque()
        self._listeners = 0
        self._reading: asyncio.Task[None] | None = None
        self._next: asyncio.Future[bytes | None] | None = None
        self._closed = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Somebody wants events inside."""
        self._listeners += 1
        try:
            yield
        finally:
            self._listeners -= 1

    def next_event(self) -> asyncio.Future[bytes | None]:
        """The next event, the same for all listeners; None when the feed is closed."""
        assert self._listeners, "nobody listens"
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        coming = self._next
        if self._closed:
            self._tell(None)
        elif self._reading is None or self._reading.done():
            self._seen.clear()
            self._reading = asyncio.create_task(self._read())
        return coming

    def close(self) -> None:
        """End all answers."""
        self._closed = True
        self._tell(None)
        if self._reading is not None:
            self._reading.cancel()

    def _tell(self, event: bytes | None) -> None:
        if self._next is not None:
            self._next.set_result(event)
            self._next = None

    async def _read(self) -> None:
        while self._listeners:
            try:
                body = msgspec.json.encode(await self._view())
            except BatonError as error:
                body = msgspec.json.encode({"error": str(error)})
            self._tell(b"data: " + body + b"\n\n")
            await asyncio.sleep(self._interval_s)

    async def _view(self) -> FleetView:
        """Raises BatonError when a page cannot be had."""
        workers = msgspec.json.decode(await self._page("/debug/workers"), type=_Workers).workers
        requests = msgspec.json.decode(await self._page("/debug/requests"), type=_Requests).requests
        # On another thread: to parse and add a large fleet's metrics takes long enough to delay streams.
        samples = await asyncio.to_thread(parse_samples, await self._page("/metrics"))
        now = Snapshot(time.monotonic(), samples, workers, [self._url], [])
        while len(self._seen) > 1 and now.at - self._seen[0].at > _WINDOW_S:
            self._seen.popleft()
        view = await asyncio.to_thread(fleet_view, now, self._seen[0] if self._seen else None, requests)
        self._seen.append(now)
        return view

    async def _page(self, target: str) -> str:
        page = await self._open_page(target)
        if page.status != 200:
            raise BatonError(f"{target} answers {page.status}")
        return page.body
