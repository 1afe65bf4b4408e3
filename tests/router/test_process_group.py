"""The processes of one router answer as one. Their mailboxes are a dict here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from common.errors import Unavailable
from router.process_group import OwnLists, ProcessGroup
from router.request_metrics import RequestMetrics
from router.streams.inspections import Inspections
from router.streams.room_report import RoomReport, WorkerReport
from router.suspicions import SuspicionCause, SuspicionReport
from router.trace import RequestTrace, TraceStore
from wire.holds import Hold
from wire.messages.any_message import AnyMessage
from wire.messages.caches import Inspect, Inspected

ANSWERS = 5.0, 10.0  # seconds for members and for the first process, where all answer
SILENCE = 0.5, 2.0  # where one does not
HOLDERS = ["router 0", "router 1", "router 2"]
Post = dict[str, Callable[[str, AnyMessage], None]]  # by address: takes the sender's address and a message


class Process:
    """One process at an address; `first` started it."""

    def __init__(self, post: Post, address: str, first: str | None, timeouts: tuple[float, float]) -> None:
        def send(to: str, message: AnyMessage) -> None:
            if to in post:
                asyncio.get_running_loop().call_soon(post[to], address, message)

        def take(sender: str, message: AnyMessage) -> None:
            if isinstance(message, Inspected):
                self.inspections.answer(message)
            elif isinstance(message, Inspect):
                self.group.answer(sender, message)

        registry = CollectorRegistry()
        self.metrics = RequestMetrics(registry)
        self.traces = TraceStore()
        self.inspections = Inspections(send)
        self.rooms: list[RoomReport] = []
        holder = f"router {address}"
        own = OwnLists(
            lambda: [*self.rooms],
            lambda: [Hold(holder, "room", "client of r", 1)],
            lambda: [SuspicionReport(address, "d", 1, SuspicionCause.EXITED, 2.0, 3.0, None)],
            abort=self.abort,
        )
        self.group = ProcessGroup(registry, self.traces, send, self.inspections, own, first, *timeouts)
        post[address] = take

    def abort(self, request_id: str | None) -> list[str]:
        """The requests that it has are its rooms."""
        found = [room.request_id for room in self.rooms if request_id in (None, room.request_id)]
        self.rooms = [room for room in self.rooms if room.request_id not in found]
        return found

    async def aborts(self) -> float:
        lines = (await self.group.metrics()).decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("baton_router_aborts_total "))


def three(timeouts: tuple[float, float] = ANSWERS) -> tuple[Post, list[Process]]:
    post: Post = {}
    processes = [Process(post, "0", None, timeouts)]
    processes += [Process(post, address, "0", timeouts) for address in ("1", "2")]
    for position, process in enumerate(processes):
        process.metrics.aborts.inc(10**position)
    for member in ("1", "2"):
        processes[0].group.join(member)
    return post, processes


def test_each_answers_for_all() -> None:
    async def run() -> None:
        _, processes = three()
        worker = WorkerReport("d", "decode", "decode_bootstrap", 3, "", 0.5)
        for number, process in enumerate(processes):
            process.rooms.append(
                RoomReport(room=number, request_id="r", epoch=0, tokens=0, why="", workers=[worker])
            )
        processes[1].traces.open(RequestTrace("r", [7], 1, []))
        for process in processes:
            assert await process.aborts() == 111
            found = await process.group.trace("r")
            assert found is not None
            assert json.loads(found)["otherData"]["rooms"] == [7]
            assert await process.group.trace("other") is None
            rooms = await process.group.rooms()
            assert sorted(room.room for room in rooms) == [0, 1, 2]
            assert all(room.workers == [worker] for room in rooms)
            assert sorted(hold.holder for hold in await process.group.holds()) == HOLDERS
            suspicions = await process.group.suspicions()
            assert sorted(one.router for one in suspicions) == ["0", "1", "2"]
            assert {one.cause for one in suspicions} == {SuspicionCause.EXITED}

    asyncio.run(run())


def test_requests_of_all_processes_are_ended_through_any() -> None:
    async def run() -> None:
        _, processes = three()
        for process in processes:
            for number, process_ in enumerate(processes):
                request_id = f"r{number}"
                process_.rooms = [
                    RoomReport(room=1, request_id=request_id, epoch=0, tokens=0, why="", workers=[])
                ]
            assert await process.group.abort("r1") == ["r1"]
            assert await process.group.abort("r1") == []
            assert await process.group.abort(None) == ["r0", "r2"]

    asyncio.run(run())


def test_a_process_that_does_not_answer_is_counted_as_it_was() -> None:
    async def run() -> None:
        post, processes = three(SILENCE)
        assert await processes[0].aborts() == 111
        del post["1"]
        processes[1].metrics.aborts.inc(1)
        processes[2].metrics.aborts.inc(1)
        for process in (processes[0], processes[2]):
            assert await process.aborts() == 112
            assert await process.group.trace("other") is None
        processes[0].group.leave("1")
        assert await processes[0].aborts() == 112
        with pytest.raises(Unavailable, match="first process"):
            await Process({}, "3", "0", SILENCE).aborts()

    asyncio.run(run())
