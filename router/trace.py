"""Timelines of the last requests: their stages, as the router and the workers stamped them."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from router.tracing import Attributes, Tracing, worker_attributes
from wire.messages.rooms import RoomStatus, Timeline
from wire.records import Role
from wire.stages import Stamp

_KEPT = 2048  # that have ended
_MOST = 65_536  # with those that have not: a bound, should the end of some never be told
_MOST_STEPS = 1024  # of a request: at most 16 MiB of all


class RequestSummary(msgspec.Struct, frozen=True):
    """One request in a list. Milliseconds from its arrival; None: not yet."""

    request_id: str
    arrived_ns: int  # of the Unix clock
    ttft_ms: float | None
    total_ms: float | None
    prefill: str | None
    decode: str | None
    placements: int  # more than one for each choice: some were started again, or moved
    kv_bytes: int


@dataclass(slots=True)
class RequestTrace:
    """One request. Times are nanoseconds of the Unix clock; 0 is not yet. `begin` and `end` do not
    go back with that clock."""

    request_id: str
    rooms: list[int]
    arrived_ns: int
    router_stamps: list[Stamp]
    first_token_ns: int = 0
    finished_ns: int = 0
    # By (room, epoch, worker id): a message may come twice.
    timelines: dict[tuple[int, int, str], Timeline] = field(default_factory=dict)
    placements: list[dict[str, Any]] = field(default_factory=list)
    # The last that each worker said of a room when it was asked, by (room, worker id).
    statuses: dict[tuple[int, str], RoomStatus] = field(default_factory=dict)
    kv_bytes: int = 0
    kv_backend: str = ""
    traceparent: str = ""  # as W3C's header; "": no spans are made of it
    steps: dict[int, array[int]] = field(default_factory=dict)  # when tokens of each room came
    steps_left: int = _MOST_STEPS

    def begin(self, now_ns: int) -> float:
        """The first token has come. Returns the seconds that it took."""
        self.first_token_ns = max(now_ns, self.arrived_ns)
        return (self.first_token_ns - self.arrived_ns) / 1e9

    def step(self, room: int, now_ns: int) -> None:
        """Tokens of a room have come."""
        if self.steps_left:
            self.steps_left -= 1
            steps = self.steps.get(room)
            if steps is None:
                self.steps[room] = array("q", (now_ns,))
            else:
                steps.append(now_ns)

    def end(self, now_ns: int) -> float:
        """The last token has come, or the request was given up. Returns the seconds that it took."""
        self.finished_ns = max(now_ns, self.arrived_ns, self.first_token_ns)
        return (self.finished_ns - self.arrived_ns) / 1e9

    def chrome(self) -> dict[str, Any]:
        """Chrome trace format: a process per worker, a thread per choice; `ts` and `dur` in microseconds."""
        events: list[dict[str, Any]] = []
        lanes = [("router", 0, 0, self.router_stamps, self.finished_ns)]
        for (room, epoch, worker), timeline in self.timelines.items():
            ordered = sorted(timeline.stamps, key=lambda stamp: stamp.at_ns)
            lanes.append((worker, room, epoch, ordered, timeline.ended_ns or self.finished_ns))
        processes = {name: number for number, name in enumerate(dict.fromkeys(name for name, *_ in lanes))}
        for name, number in processes.items():
            events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}})
        for name, room, epoch, stages, ended_ns in lanes:
            lane = self.rooms.index(room) if room in self.rooms else 0
            for i, stamp in enumerate(stages):
                at_ns = stamp.at_ns
                end_ns = stages[i + 1].at_ns if i + 1 < len(stages) else max(ended_ns, at_ns)
                events.append(
                    {
                        "ph": "X", "name": str(stamp.stage), "pid": processes[name], "tid": lane,
                        "ts": at_ns / 1e3, "dur": (end_ns - at_ns) / 1e3,
                        "args": {"worker": name, "room": room, "epoch": epoch, "at_ns": at_ns},
                    }
                )  # fmt: skip
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": self._summary()}

    def summary(self) -> RequestSummary:
        """The request in a list."""
        last = self.placements[-1] if self.placements else {}
        return RequestSummary(
            self.request_id, self.arrived_ns, self._since_arrival(self.first_token_ns),
            self._since_arrival(self.finished_ns), last.get("prefill"), last.get("decode"),
            len(self.placements), self.kv_bytes,
        )  # fmt: skip

    def prefills(self) -> set[tuple[int, int, str]]:
        """Room, epoch and id of the workers that were to prefill for another."""
        return {(one["room"], one["epoch"], one["prefill"]) for one in self.placements if one["prefill"]}

    def _since_arrival(self, at_ns: int) -> float | None:
        return (at_ns - self.arrived_ns) / 1e6 if at_ns else None

    def _cached_from(self) -> dict[str, dict[str, int]]:
        """Prompt tokens that each worker found cached, by where it had them from."""
        found: dict[str, Counter[str]] = {}
        for (_, _, worker), timeline in self.timelines.items():
            found.setdefault(worker, Counter()).update(timeline.cached_from)
        return {worker: dict(tokens) for worker, tokens in found.items() if tokens}

    def _summary(self) -> dict[str, Any]:
        last = self.placements[-1] if self.placements else {}
        return {
            "request_id": self.request_id,
            "rooms": self.rooms,
            "prefill": last.get("prefill"),
            "decode": last.get("decode"),
            "placements": self.placements,
            "statuses": [{"worker": worker, "said": said} for (_, worker), said in self.statuses.items()],
            "kv_bytes": self.kv_bytes,
            "kv_backend": self.kv_backend,
            "cached_from": self._cached_from(),
            "token_ns": {str(room): list(steps) for room, steps in self.steps.items()},
            "ttft_ms": self._since_arrival(self.first_token_ns),
            "total_ms": self._since_arrival(self.finished_ns),
        }


class TraceStore:
    """Traces of the requests that have not ended and of the last ones that have, by request and by room."""

    def __init__(self, tracing: Tracing | None = None) -> None:
        """`tracing` makes spans of what is added."""
        self._tracing = tracing
        self._by_request: dict[str, RequestTrace] = {}  # in the order in which they came
        self._ended: dict[str, RequestTrace] = {}  # of those, in the order in which they ended
        self._by_room: dict[int, RequestTrace] = {}

    def open(self, trace: RequestTrace) -> None:
        """Keep a request's trace."""
        previous = self._by_request.get(trace.request_id)
        if previous is not None:  # a client may use a request id twice
            self._forget(previous)
        self._by_request[trace.request_id] = trace
        for room in trace.rooms:
            self._by_room[room] = trace
        if len(self._by_request) > _MOST:
            self._forget(next(iter(self._by_request.values())))

    def get(self, request_id: str) -> RequestTrace | None:
        """A request's trace while it is kept."""
        return self._by_request.get(request_id)

    def newest(self, most: int) -> list[RequestSummary]:
        """The requests that came last, the newest first."""
        return [trace.summary() for trace in islice(reversed(self._by_request.values()), most)]

    def add_timeline(self, timeline: Timeline) -> bool:
        """Add a worker's part of a room. It may come late, twice, and after the request has ended.

        Returns False when it was known already, or the trace is not kept any more.
        """
        trace = self._by_room.get(timeline.room)
        if trace is None:
            return False
        key = (timeline.room, timeline.epoch, timeline.worker)
        if key in trace.timelines:
            return False
        trace.timelines[key] = timeline
        if timeline.kv_bytes:
            trace.kv_bytes += timeline.kv_bytes
            trace.kv_backend = timeline.kv_backend
        if self._tracing is not None and trace.traceparent:
            prefill = (timeline.room, timeline.epoch, timeline.worker) in trace.prefills()
            self._tracing.stages(
                trace.traceparent, Role.PREFILL if prefill else Role.DECODE, timeline.stamps,
                timeline.ended_ns, worker_attributes(timeline),
            )  # fmt: skip
        return True

    def ended(self, trace: RequestTrace, figures: Attributes) -> None:
        """A request has ended: its trace goes when enough others have ended. `figures` are what its span says
        of it."""
        if self._tracing is not None and trace.traceparent:
            self._tracing.stages(trace.traceparent, "router", trace.router_stamps, trace.finished_ns, figures)
        if self._by_request.get(trace.request_id) is trace:
            self._ended[trace.request_id] = trace
        if len(self._ended) > _KEPT:
            self._forget(next(iter(self._ended.values())))

    def placed(self, room: int, epoch: int, prefill: str | None, decode: str) -> None:
        """Add the workers that a room was given."""
        trace = self._by_room.get(room)
        if trace is not None:
            trace.placements.append({"room": room, "epoch": epoch, "prefill": prefill, "decode": decode})

    def status(self, worker: str, status: RoomStatus) -> None:
        """Add what a worker said of a room that is silent."""
        trace = self._by_room.get(status.room)
        if trace is not None:
            trace.statuses[status.room, worker] = status

    def _forget(self, trace: RequestTrace) -> None:
        del self._by_request[trace.request_id]
        self._ended.pop(trace.request_id, None)
        for room in trace.rooms:
            self._by_room.pop(room, None)
