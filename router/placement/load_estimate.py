"""WorkerLoadEstimate: how busy one worker is, from its last report and from what routers have assigned to it.

Three sources are combined, because none is enough alone:

    report   the worker's own, sent with every renewal of its lease. Complete, but a fraction of a second
             old, or as old as a long forward.
    own      what this router has assigned and has not seen finished.
    peers    what the other routers have assigned (peers.py).

Queued prefill tokens are the last report, less what the worker has computed since at its own rate, plus what
all routers have assigned since the report and have not seen finished. A prompt that was assigned before the
report is not subtracted when it finishes: the report may have counted only a part of it. A decode worker
keeps a request until its end, so its requests and context are the greater of the report and of the routers'
sum.

A worker's figures date from the end of a turn, and include the mail that it took at the turn's beginning. In
a long forward it renews its lease with the figures from before. So a report tells how old the figures are and
how old their mail. "Since the report" is since the figures for what the worker computes, and since their mail
for what is assigned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field
from itertools import takewhile

from wire.records import WorkerLoad, WorkerRecord

NO_REPORT = WorkerLoad()
"""The load of a worker that has not reported any."""
_UNREPORTED_S = 0.05  # a prompt assigned this long before the mail was taken may not have been in it

_Assigned = tuple[float, int]
"""When something was assigned, and its tokens."""


@dataclass(slots=True)
class AssignedLoad:
    """What one router, or several together, have assigned to one worker. In tokens unless stated."""

    requests: int = 0  # rooms that decode on the worker, or wait to
    prefills: int = 0  # rooms whose first token has not come yet
    prefill_tokens: int = 0  # of those rooms: prompt tokens to compute
    context_tokens: int = 0  # of the rooms that decode on the worker: prompt and expected output
    since_tokens: int = 0  # the part of prefill_tokens that was assigned since the worker's last report
    promised_tokens: int = 0  # taken from decode's headroom since the report
    promised_rooms: int = 0  # rows taken from decode's headroom since the report


@dataclass(slots=True)
class WorkerLoadEstimate:
    """One incarnation of one worker."""

    record: WorkerRecord
    now: InitVar[float]
    reported_at: float = field(init=False)  # when the worker took the figures of its last report
    own: AssignedLoad = field(default_factory=AssignedLoad)
    peers: AssignedLoad = field(default_factory=AssignedLoad)
    _mail_at: float = field(init=False)  # when it took the mail that they include
    _prefilling: dict[int, _Assigned] = field(default_factory=dict)  # by ticket, oldest first
    _decoding: dict[int, _Assigned] = field(default_factory=dict)  # likewise
    _tickets: int = 0

    def __post_init__(self, now: float) -> None:
        self._date(now)

    def report(self, record: WorkerRecord, now: float) -> bool:
        """Take the record of a new View. A record with the same load as before is not a new report.

        Returns whether `own` has changed.
        """
        before = self.record.load
        self.record = record
        if record.load == before:
            return False
        self._date(now)
        own = self.own
        counted = own.since_tokens, own.promised_tokens, own.promised_rooms
        prefilling = takewhile(self._is_unreported, reversed(self._prefilling.values()))
        promised = list(takewhile(self._is_promised, reversed(self._decoding.values())))
        own.since_tokens = _tokens(prefilling)
        own.promised_tokens, own.promised_rooms = _tokens(promised), len(promised)
        return counted != (own.since_tokens, own.promised_tokens, own.promised_rooms)

    def prefill(self, tokens: int, now: float) -> int:
        """Assign a prompt with this many tokens to compute. Returns a ticket for `prefilled`."""
        own = self.own
        own.prefills += 1
        own.prefill_tokens += tokens
        own.since_tokens += tokens
        self._tickets += 1
        self._prefilling[self._tickets] = (now, tokens)
        return self._tickets

    def prefilled(self, ticket: int) -> None:
        """The prompt is computed, or will not be. Call it once per ticket."""
        assigned = self._prefilling.pop(ticket)
        _, tokens = assigned
        own = self.own
        own.prefills -= 1
        own.prefill_tokens -= tokens
        if self._is_unreported(assigned):
            own.since_tokens -= tokens

    def decode(self, context_tokens: int, now: float) -> int:
        """Assign a request whose prompt and expected output have this many tokens.

        Returns a ticket for `decoded`.
        """
        own = self.own
        own.requests += 1
        own.context_tokens += context_tokens
        own.promised_tokens += context_tokens
        own.promised_rooms += 1
        self._tickets += 1
        self._decoding[self._tickets] = (now, context_tokens)
        return self._tickets

    def decoded(self, ticket: int) -> None:
        """The request is over. Call it once per ticket. A short request may never have been in a report."""
        assigned = self._decoding.pop(ticket)
        _, context_tokens = assigned
        own = self.own
        own.requests -= 1
        own.context_tokens -= context_tokens
        if self._is_promised(assigned):
            own.promised_tokens -= context_tokens
            own.promised_rooms -= 1

    def _date(self, now: float) -> None:
        """The record's load has come. The way that it took is not known, and counts as no time."""
        load = self.record.load
        self.reported_at, self._mail_at = now - load.age_s, now - load.mail_age_s

    def _is_unreported(self, prompt: _Assigned) -> bool:
        """Whether the last report may not have counted a prompt."""
        return self._mail_at - prompt[0] < _UNREPORTED_S

    def _is_promised(self, request: _Assigned) -> bool:
        """Whether the last report's headroom is taken to be without a request.

        One that was under way when the mail was taken is missed: a Prefill is sent early, and the pages that
        P keeps for it can be evicted. To count one twice would keep others waiting until the next report.
        """
        return request[0] >= self._mail_at

    def requests(self) -> int:
        """Requests that run on a decode worker, or wait to."""
        load = self.record.load
        return max(load.running_requests + load.waiting_requests, self.own.requests + self.peers.requests)

    def context(self) -> int:
        """KV tokens that requests on a decode worker hold, or will hold."""
        load, record = self.record.load, self.record
        assigned = self.own.context_tokens + self.peers.context_tokens
        return max(record.total_tokens - load.free_tokens if load != NO_REPORT else 0, assigned)

    def fits(self, context_tokens: int) -> bool:
        """Whether a decode worker has headroom for one more request of this many tokens."""
        load = self.record.load
        return (
            context_tokens <= load.headroom_tokens - self.promised_tokens
            and self.promised_rooms < load.headroom_rows
        )

    def can_start(self, context_tokens: int) -> bool:
        """Whether a decode worker could start one more request at once. An idle worker always can."""
        if self.record.draining:
            return False
        return self.record.load == NO_REPORT or self.requests() == 0 or self.fits(context_tokens)

    def has_backlog(self) -> bool:
        """Whether as many requests wait on a decode worker as run in a full batch of it. Its headroom does
        not tell: a request that the worker prefills itself reserves nothing while it waits."""
        return self.requests() >= 2 * self.record.max_running_requests

    @property
    def promised_tokens(self) -> int:
        """Tokens of the last reported headroom that all routers have promised."""
        return self.own.promised_tokens + self.peers.promised_tokens

    @property
    def promised_rooms(self) -> int:
        """Rows of the last reported headroom that all routers have promised."""
        return self.own.promised_rooms + self.peers.promised_rooms


def _tokens(assigned: Iterable[_Assigned]) -> int:
    return sum(tokens for _, tokens in assigned)
