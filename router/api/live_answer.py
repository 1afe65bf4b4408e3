"""GET /admin/live of the admin listener: the dashboard's events."""

from __future__ import annotations

import asyncio
from typing import Any

from router.api.asgi import Headers, Receive, Send
from router.dashboard.live import LiveFeed

_UNREAD_S = 30.0  # a client that takes nothing for so long is left
_HEAD: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def answer_live(feed: LiveFeed, receive: Receive, send: Send) -> None:
    """Answer with events until the client leaves or the feed is closed."""
    await send({"type": "http.response.start", "status": 200, "headers": _HEAD})
    left = asyncio.create_task(_client_left(receive))
    try:
        with feed.listening():
            while True:
                coming = feed.next_event()
                waited: list[asyncio.Future[Any]] = [coming, left]
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                event = None if left.done() else coming.result()
                if event is None:
                    break
                async with asyncio.timeout(_UNREAD_S):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
    except TimeoutError:
        pass
    finally:
        left.cancel()
    await send({"type": "http.response.body", "body": b""})


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
