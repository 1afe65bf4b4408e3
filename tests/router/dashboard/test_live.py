"""The dashboard's events: one reading for all listeners, and every answer ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from router.api.live_answer import answer_live
from router.dashboard.live import LiveFeed
from router.dashboard.view import FleetView, fleet_view
from router.measures import Count
from router.metrics import RoomMetrics
from router.page import Page, json_page
from router.placement.transfer_rates import Locality, TransferPair
from router.trace import RequestTrace
from tests.router.directory.test_directory import record
from wire.records import GroupPages, Role, WorkerFigures

_BOUND_S = 10.0


class _Client:
    """One request for events, and what it was sent."""

    def __init__(self, feed: LiveFeed) -> None:
        self._left = asyncio.Event()
        self._sent: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        self.answer = asyncio.create_task(answer_live(feed, self._receive, self._send))

    async def event(self) -> FleetView | dict[str, str]:
        while True:
            message = await asyncio.wait_for(self._sent.get(), _BOUND_S)
            body = message.get("body", b"")
            if body:
                told = body.removeprefix(b"data: ").removesuffix(b"\n\n")
                wanted: Any = dict[str, str] if told.startswith(b'{"error"') else FleetView
                return msgspec.json.decode(told, type=wanted)

    async def leave(self) -> None:
        self._left.set()
        await asyncio.wait_for(self.answer, _BOUND_S)

    async def _receive(self) -> MutableMapping[str, Any]:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        self._sent.put_nowait(message)


class _Router:
    """The pages that the feed reads, of a router with two workers."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.tokens = Count(self.registry, "baton_router_output_tokens", "")
        self.rooms = RoomMetrics(self.registry)
        self.readings = 0
        self.broken = False
        pages = {"full": GroupPages(total=100, free=60, evictable=30, evicted=7)}
        self.workers = [
            record("d1", role=Role.DECODE, figures=WorkerFigures(groups=pages)),
            record("p1"),
        ]
        self.trace = RequestTrace("one", [5], arrived_ns=10**18, router_stamps=[])
        self.trace.begin(10**18 + 20_000_000)

    async def open_page(self, target: str) -> Page:
        if target == "/metrics":
            self.readings += 1
            return Page(503 if self.broken else 200, "", generate_latest(self.registry).decode())
        if target == "/debug/workers":
            return json_page({"workers": self.workers})
        assert target == "/debug/requests"
        return json_page({"requests": [self.trace.summary()]})


def _in_loop(test: Callable[[_Router, LiveFeed], Awaitable[None]]) -> None:
    async def run() -> None:
        router = _Router()
        feed = LiveFeed(router.open_page, "http://here", interval_s=0.01)
        try:
            await test(router, feed)
        finally:
            feed.close()

    asyncio.run(run())


def test_an_event_says_what_the_fleet_does() -> None:
    async def test(router: _Router, feed: LiveFeed) -> None:
        client = _Client(feed)
        first = await client.event()
        assert isinstance(first, FleetView)
        assert first.window_s is None
        router.tokens.inc(100)
        router.rooms.observe_transfer(TransferPair("p1", "d1", Locality.HOST), 4_000, 0.002)
        view = await client.event()
        while isinstance(view, FleetView) and not view.figures.output_tokens_s:
            view = await client.event()
        assert isinstance(view, FleetView)
        assert view.window_s is not None
        assert view.figures.output_tokens_s == pytest.approx(100 / view.window_s)
        assert [(one.id, one.role) for one in view.workers] == [("p1", "prefill"), ("d1", "decode")]
        (kv,) = view.workers[1].kv
        assert (kv.group, kv.used, kv.cached, kv.free, kv.evicted) == ("full", 10, 30, 60, 7)
        (flow,) = view.flows
        assert (flow.prefill, flow.decode, flow.bytes) == ("p1", "d1", 4_000)
        assert flow.bytes_per_s == pytest.approx(2e6)
        assert [(one.request_id, one.ttft_ms, one.total_ms) for one in view.requests] == [("one", 20.0, None)]
        await client.leave()

    _in_loop(test)


def test_listeners_share_the_readings_and_none_are_made_for_nobody() -> None:
    async def test(router: _Router, feed: LiveFeed) -> None:
        clients = [_Client(feed) for _ in range(5)]
        assert len({id(type(await client.event())) for client in clients}) == 1
        assert router.readings <= 2, "one for all five"
        for client in clients:
            await client.leave()
        last = _Client(feed)  # after a reading that had no listener, if there was one
        await last.event()
        await last.leave()
        await asyncio.sleep(0.03)
        readings = router.readings
        await asyncio.sleep(0.05)
        assert router.readings == readings

    _in_loop(test)


def test_a_page_that_cannot_be_had_is_told_and_tried_again() -> None:
    async def test(router: _Router, feed: LiveFeed) -> None:
        router.broken = True
        client = _Client(feed)
        assert await client.event() == {"error": "/metrics answers 503"}
        router.broken = False
        while not isinstance(await client.event(), FleetView):
            pass
        await client.leave()

    _in_loop(test)


def test_a_closed_feed_ends_its_answers() -> None:
    async def test(_: _Router, feed: LiveFeed) -> None:
        clients = [_Client(feed) for _ in range(3)]
        for client in clients:
            await client.event()
        feed.close()
        for client in clients:
            await asyncio.wait_for(client.answer, _BOUND_S)

    _in_loop(test)


def test_a_view_is_made_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of 200 workers take 50 ms, every two seconds."""
    makers: list[threading.Thread] = []

    def make(*given: Any) -> FleetView:
        makers.append(threading.current_thread())
        return fleet_view(*given)

    monkeypatch.setattr("router.dashboard.live.fleet_view", make)

    async def check(_: _Router, feed: LiveFeed) -> None:
        client = _Client(feed)
        assert isinstance(await client.event(), FleetView)
        await client.leave()

    _in_loop(check)
    assert makers
    assert threading.main_thread() not in makers
