"""ProcessGroup: the processes of one router (`--processes N`) answer as one.

They do so at /metrics, /debug/trace, /debug/rooms, /debug/leases and /debug/suspicions. The first process
knows the others by their mailboxes. It serves the admin listener, and asks one of them for each page; that
one asks the first for what all of them have a part of, and the first asks each. Questions are `Inspect`
messages, and every wait is bounded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec
from prometheus_client import CollectorRegistry

from common.errors import Unavailable
from router.http_errors import error_body
from router.merged_metrics import MergedMetrics, MetricFamily, collect, exposition, merge
from router.options import MetricsCompat
from router.page import Page, json_page
from router.streams.inspections import Inspections
from router.streams.room_report import RoomReport
from router.suspicions import SuspicionReport
from router.trace import RequestSummary, TraceStore
from router.vllm_metrics import vllm_aliases
from wire.holds import Hold
from wire.messages.any_message import AnyMessage
from wire.messages.caches import Inspect, Inspected

log = logging.getLogger(__name__)

_METRICS = "metrics"
_TRACE = "trace "  # and a request id
_ROOMS = "rooms"
_HOLDS = "leases"
_SUSPICIONS = "suspicions"
_REQUESTS = "requests"
_ABORT = "abort "  # and a request id; none: all requests
_PAGE = "page "  # and its path and query
_NEWEST_REQUESTS = 50  # of each process
_PAGE_TIMEOUT_S = 15.0  # longer than a page waits for a worker
_Families = list[MetricFamily]
_Row = TypeVar("_Row")


async def _no_page(target: str) -> Page:
    return json_page(error_body(f"{target} is not here", "invalid_request_error"), 404)


def _none_to_abort(_: str | None) -> list[str]:
    return []


class OwnLists(NamedTuple):
    """What one process has to list. Each call makes a new list. `page` opens an admin page. `abort` ends
    the requests of an id, or all, and lists them."""

    rooms: Callable[[], list[RoomReport]] = list
    holds: Callable[[], list[Hold]] = list
    suspicions: Callable[[], list[SuspicionReport]] = list
    page: Callable[[str], Awaitable[Page]] = _no_page
    abort: Callable[[str | None], list[str]] = _none_to_abort


class ProcessGroup:
    """One process's part. Belongs to the event loop."""

    def __init__(
        self,
        registry: CollectorRegistry,
        traces: TraceStore,
        send: Callable[[str, AnyMessage], None],
        inspections: Inspections,
        own: OwnLists,
        first: str | None,
        member_timeout_s: float = 1.0,
        first_timeout_s: float = 4.0,
        compat: MetricsCompat | None = None,
    ) -> None:
        """`first` is the mailbox of the first process, None in the first itself, which names metrics as
        `compat`, too.

        The first waits `member_timeout_s` for the others, and they wait `first_timeout_s` for the first.
        """
        self._registry = registry
        self._traces = traces
        self._send = send
        self._inspections = inspections
        self._own = own
        self._first = first
        self._member_timeout_s = member_timeout_s
        self._first_timeout_s = first_timeout_s
        self._compat = compat
        self._members: set[str] = set()  # mailboxes of the other processes, in the first
        self._merged = MergedMetrics()
        self._answering: set[asyncio.Task[None]] = set()
        self._turn = 0  # counts the pages that were asked of members

    def join(self, mailbox: str) -> None:
        """Another process serves."""
        self._members.add(mailbox)

    def leave(self, mailbox: str) -> None:
        """Another process has ended."""
        self._members.discard(mailbox)
        self._merged.end(mailbox)

    async def metrics(self) -> bytes:
        """The Prometheus exposition of all processes. Raises Unavailable when the first does not answer."""
        if self._first is not None:
            return (await self._ask_first(_METRICS)).encode()
        for member, said in await self._ask_members(_METRICS):
            self._merged.take(member, msgspec.json.decode(said, type=_Families))
        # On another thread: of a large fleet this takes long enough to delay streams.
        return await asyncio.to_thread(_exposed, self._merged.parts(collect(self._registry)), self._compat)

    async def trace(self, request_id: str) -> bytes | None:
        """A request's timeline as JSON, of whichever process has it. Raises Unavailable, see `metrics`."""
        own = self._own_trace(request_id)
        if own is not None:
            return own
        if self._first is not None:
            found = [await self._ask_first(_TRACE + request_id)]
        else:
            found = [said for _, said in await self._ask_members(_TRACE + request_id)]
        return next((said.encode() for said in found if said), None)

    async def rooms(self) -> list[RoomReport]:
        """Where every room of every process is. Raises Unavailable, see `metrics`."""
        return await self._listed(_ROOMS, self._own.rooms(), RoomReport)

    async def holds(self) -> list[Hold]:
        """What every process holds for others. Raises Unavailable, see `metrics`."""
        return await self._listed(_HOLDS, self._own.holds(), Hold)

    async def suspicions(self) -> list[SuspicionReport]:
        """The latest suspicions of every process. Raises Unavailable, see `metrics`."""
        return await self._listed(_SUSPICIONS, self._own.suspicions(), SuspicionReport)

    async def requests(self) -> list[RequestSummary]:
        """The newest requests of every process, the newest first. Raises Unavailable, see `metrics`."""
        found = await self._listed(_REQUESTS, self._traces.newest(_NEWEST_REQUESTS), RequestSummary)
        return sorted(found, key=lambda one: -one.arrived_ns)[:_NEWEST_REQUESTS]

    async def abort(self, request_id: str | None) -> list[str]:
        """End the requests of an id, or all, in every process. Returns their ids. Raises Unavailable, see
        `metrics`."""
        own = [] if self._first is not None else self._own.abort(request_id)
        return sorted(await self._listed(_ABORT + (request_id or ""), own, str))

    async def page(self, target: str) -> Page:
        """The admin page at a path with its query, as another process shows it. Each is asked in turn. One
        that makes a change tells the others, through the directory.

        Raises Unavailable when it does not answer.
        """
        if not self._members:
            raise Unavailable("no process of this router serves")
        members = sorted(self._members)
        self._turn += 1
        try:
            member = members[self._turn % len(members)]
            said = await self._inspections.ask(member, _PAGE + target, _PAGE_TIMEOUT_S)
        except TimeoutError:
            raise Unavailable("a process of this router did not answer in time: try again") from None
        return msgspec.json.decode(said, type=Page)

    def answer(self, to: str, question: Inspect) -> None:
        """Answer another process."""
        task = asyncio.create_task(self._answer(to, question))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def close(self) -> None:
        """Stop answering."""
        for task in self._answering:
            task.cancel()

    async def _answer(self, to: str, question: Inspect) -> None:
        if question.what.startswith(_TRACE):
            request_id = question.what.removeprefix(_TRACE)
            found = self._own_trace(request_id) if self._first is not None else await self.trace(request_id)
        elif question.what.startswith(_PAGE):
            page = await self._own.page(question.what.removeprefix(_PAGE))
            found = msgspec.json.encode(page)
        elif question.what.startswith(_ABORT):
            ended = question.what.removeprefix(_ABORT) or None
            alone = self._first is not None
            found = msgspec.json.encode(self._own.abort(ended) if alone else await self.abort(ended))
        elif question.what in (_ROOMS, _HOLDS, _SUSPICIONS, _REQUESTS):
            found = msgspec.json.encode(await self._list_of(question.what))
        elif self._first is not None:
            found = msgspec.json.encode(collect(self._registry))
        else:
            found = await self.metrics()
        self._send(to, Inspected(question.token, (found or b"").decode()))

    async def _list_of(self, what: str) -> Sequence[object]:
        """What another process is answered: of this process by the others, of all by the first."""
        alone = self._first is not None
        if what == _ROOMS:
            return self._own.rooms() if alone else await self.rooms()
        if what == _HOLDS:
            return self._own.holds() if alone else await self.holds()
        if what == _REQUESTS:
            return self._traces.newest(_NEWEST_REQUESTS) if alone else await self.requests()
        return self._own.suspicions() if alone else await self.suspicions()

    async def _listed(self, what: str, own: list[_Row], kind: type[_Row]) -> list[_Row]:
        """The rows of all processes, `own` among them."""
        if self._first is not None:
            said = [await self._ask_first(what)]
            own = []  # the first asks this process, too
        else:
            said = [answer for _, answer in await self._ask_members(what)]
        return own + [row for rows in said for row in msgspec.json.decode(rows, type=list[kind])]  # type: ignore[valid-type]

    def _own_trace(self, request_id: str) -> bytes | None:
        trace = self._traces.get(request_id)
        return None if trace is None else msgspec.json.encode(trace.chrome())

    async def _ask_first(self, what: str) -> str:
        assert self._first is not None
        try:
            return await self._inspections.ask(self._first, what, self._first_timeout_s)
        except TimeoutError:
            raise Unavailable("the router's first process did not answer in time") from None

    async def _ask_members(self, what: str) -> list[tuple[str, str]]:
        """The answers that come in time, each with its process."""

        async def ask(member: str) -> tuple[str, str] | None:
            try:
                return member, await self._inspections.ask(member, what, self._member_timeout_s)
            except TimeoutError:
                log.warning("router process %s did not answer %r in time", member, what)
                return None

        answers = await asyncio.gather(*(ask(member) for member in self._members))
        return [answer for answer in answers if answer is not None and answer[0] in self._members]


def _exposed(parts: list[list[MetricFamily]], compat: MetricsCompat | None) -> bytes:
    families = merge(parts)
    return exposition(families + (list(vllm_aliases(families)) if compat == "vllm" else []))
