"""Fleet: how busy every live worker is, as arrays by row, so that a policy prices a thousand in one go.

Three sources say it, and none is enough alone:

    report   the worker's own, with every renewal of its lease: complete, but a fraction of a second old
    own      what this router has given it and not seen done yet
    peers    what other routers say that they have given it (`peers.py`)

Queued prefill work is projected to now: it is the last report, less what it has computed since at its
own rate, plus what all routers placed since and have not seen done. (What was placed before the report is not
taken off when it is done: the report may have counted only its rest.) A decode worker keeps a request until
its end, so requests and context are the greater of the report and of what all routers know.

An account is the truth of one worker; the arrays beside it have a row rewritten when its account changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from router.index.global_index import GlobalIndex
from router.index.native.build import native
from wire.records import Role, WorkerLoad, WorkerRecord

Floats = npt.NDArray[np.float64]
_IN_FLIGHT_S = 0.05  # a placement that much before a report may still have been on its way to the worker


@dataclass(slots=True)
class Given:
    """What one router, or several together, have given one worker. Tokens unless said."""

    requests: int = 0  # rooms that decode there, or wait to
    prefills: int = 0  # rooms whose first token has not come yet
    prefill_tokens: int = 0  # of those, to compute
    context_tokens: int = 0  # of the rooms that decode there: prompt and expected output
    since_tokens: int = 0  # of prefill_tokens, placed since the worker's last report
    promised_tokens: int = 0  # of decode's headroom, since the report
    promised_rooms: int = 0


@dataclass(slots=True)
class Account:
    """One worker: its last report, and what it has been given."""

    record: WorkerRecord
    reported_at: float
    report_number: int = 0
    own: Given = field(default_factory=Given)
    peers: Given = field(default_factory=Given)
    _prefilling: dict[int, tuple[float, int]] = field(default_factory=dict)  # ticket -> when, tokens
    _tickets: int = 0

    def report(self, record: WorkerRecord, now: float) -> bool:
        """A View has this record; it is news if the load differs. Says whether what was given changed."""
        before = self.record.load
        self.record = record
        if record.load == before:
            return False
        self.reported_at = now
        self.report_number += 1
        late = 0
        for placed_at, tokens in reversed(self._prefilling.values()):
            if not self._unreported(placed_at):
                break
            late += tokens
        own = self.own
        changed = own.promised_rooms > 0 or own.since_tokens != late
        own.since_tokens = late
        # What was promised before the report is taken to be in it. If it is not yet, a Prefill goes out
        # early; P keeps nothing for it that it could not evict.
        own.promised_tokens = own.promised_rooms = 0
        return changed

    def prefill(self, tokens: int, now: float) -> int:
        """It was given a prompt to compute. Returns a ticket for `prefilled`."""
        own = self.own
        own.prefills += 1
        own.prefill_tokens += tokens
        own.since_tokens += tokens
        self._tickets += 1
        self._prefilling[self._tickets] = (now, tokens)
        return self._tickets

    def prefilled(self, ticket: int) -> None:
        """It has computed it, or will not. Once."""
        placed_at, tokens = self._prefilling.pop(ticket)
        own = self.own
        own.prefills -= 1
        own.prefill_tokens -= tokens
        if self._unreported(placed_at):
            own.since_tokens -= tokens

    def decode(self, context_tokens: int) -> int:
        """It was given a request, whose prompt and expected output are so long. Returns the report number."""
        own = self.own
        own.requests += 1
        own.context_tokens += context_tokens
        own.promised_tokens += context_tokens
        own.promised_rooms += 1
        return self.report_number

    def decoded(self, context_tokens: int, report_number: int) -> None:
        """That request is over. Once. Reports may never have seen it, if it was short."""
        own = self.own
        own.requests -= 1
        own.context_tokens -= context_tokens
        if report_number == self.report_number:
            own.promised_tokens -= context_tokens
            own.promised_rooms -= 1

    def _unreported(self, placed_at: float) -> bool:
        """The last report did not count it, or may not have."""
        return self.reported_at - placed_at < _IN_FLIGHT_S

    def requests(self) -> int:
        """Requests on a decode worker."""
        load = self.record.load
        return max(load.running_requests + load.waiting_requests, self.own.requests + self.peers.requests)

    def context(self) -> int:
        """KV tokens that requests on a decode worker hold, or will."""
        load, record = self.record.load, self.record
        known = self.own.context_tokens + self.peers.context_tokens
        return max(record.total_tokens - load.free_tokens if load != _SILENT else 0, known)

    def fits(self, context_tokens: int) -> bool:
        """A decode worker has room for one more at once, as far as one can tell."""
        load = self.record.load
        return (
            context_tokens <= load.headroom_tokens - self.promised_tokens
            and self.promised_rooms < load.headroom_rows
        )

    @property
    def promised_tokens(self) -> int:
        """Of the headroom last reported, by all routers."""
        return self.own.promised_tokens + self.peers.promised_tokens

    @property
    def promised_rooms(self) -> int:
        """Of the rows last reported, by all routers."""
        return self.own.promised_rooms + self.peers.promised_rooms


_SILENT = WorkerLoad()


@dataclass(frozen=True, slots=True)
class Rows:
    """Workers of one role that take new work, as a policy sees them now. Arrays are as long as `names`; they
    are the fleet's own, and right until it changes."""

    names: list[str]
    slots: npt.NDArray[np.int64]  # where an index row speaks of them
    hosts: npt.NDArray[np.int64]  # equal numbers, over both roles: the same host
    figures: Floats  # [4, workers]: queued, requests, context, capacity

    def __len__(self) -> int:
        return len(self.names)

    @property
    def queued(self) -> Floats:
        """Prefill tokens ahead of a new prompt."""
        return self.figures[0, :]

    @property
    def requests(self) -> Floats:
        """Requests that run there, or wait to."""
        return self.figures[1, :]

    @property
    def context(self) -> Floats:
        """KV tokens that requests hold, or will."""
        return self.figures[2, :]

    @property
    def capacity(self) -> Floats:
        """KV tokens."""
        return self.figures[3, :]

    def only(self, kept: list[int]) -> Rows:
        """Some of them."""
        names = [self.names[row] for row in kept]
        return Rows(names, self.slots[kept], self.hosts[kept], self.figures[:, kept])


class Candidates(NamedTuple):
    """Who may be chosen."""

    prefill: Rows
    decode: Rows


class _Table:
    """The accounts as arrays, P before D, so that one operation serves both. Of an account that changed a
    column is written; nothing else is copied."""

    def __init__(self, accounts: list[Account], index: GlobalIndex) -> None:
        accounts = sorted(accounts, key=lambda one: one.record.role is Role.DECODE)
        self.index_version = index.version
        self.row = {one.record.id: row for row, one in enumerate(accounts)}
        hosts: dict[str, int] = {}
        host = np.array([hosts.setdefault(one.record.host, len(hosts)) for one in accounts], np.int64)
        slots = np.array([index.join(name) for name in self.row], np.int64)
        # First those that a policy sees. A reported queue is base - rate x now, until it is empty.
        self._figures = figures = np.zeros((7, len(accounts)))
        self._queued, self._requests, self._context, self._capacity = figures[:4]
        self._base, self._rate, self._since = figures[4:]
        self._compiled = native()
        for one in accounts:
            self.reported(one)
        names, split = list(self.row), sum(one.record.role is Role.PREFILL for one in accounts)
        self._candidates = Candidates(
            *(
                Rows(names[part], slots[part], host[part], figures[:4, part])
                for part in (slice(split), slice(split, None))
            )
        )

    def reported(self, account: Account) -> None:
        """The worker has reported, so anything may be another."""
        row, load = self.row[account.record.id], account.record.load
        rate = load.prefill_tokens_per_s
        self._base[row] = load.queued_prefill_tokens + rate * account.reported_at
        self._rate[row] = rate
        self._capacity[row] = account.record.total_tokens
        self.given(account)

    def given(self, account: Account) -> None:
        """Routers gave it something, or took it back."""
        row = self.row[account.record.id]
        self._since[row] = account.own.since_tokens + account.peers.since_tokens
        self._requests[row] = account.requests()
        self._context[row] = account.context()

    def candidates(self, now: float) -> Candidates:
        """What a policy sees."""
        if self._compiled is not None:
            self._compiled.project(self._figures, now)
        else:
            self._project(now)
        return self._candidates

    def _project(self, now: float) -> None:
        """What is queued now: the reference of the one in module.cpp."""
        queued = self._queued
        np.multiply(self._rate, now, out=queued)
        np.subtract(self._base, queued, out=queued)
        np.maximum(queued, 0.0, out=queued)
        np.add(queued, self._since, out=queued)


class Fleet:
    """All live workers of the model, with an account of each."""

    def __init__(self, index: GlobalIndex) -> None:
        self.on_given: Callable[[Account], None] | None = None  # what this router has given is another now
        self._index = index
        self._accounts: dict[str, Account] = {}
        self._table = _Table([], index)

    def __contains__(self, worker: str) -> bool:
        return worker in self._accounts

    def account(self, worker: str) -> Account | None:
        """A live worker's account. Call `changed` after writing to `peers`, or `given` if it was to `own`."""
        return self._accounts.get(worker)

    def accounts(self) -> list[Account]:
        """All of them."""
        return list(self._accounts.values())

    def update(self, records: list[WorkerRecord], now: float) -> list[str]:
        """A new View. Accounts of workers that stay are kept; a new incarnation starts a fresh one.

        Returns the workers that are gone, those with a new incarnation among them.
        """
        before, self._accounts = self._accounts, {}
        gone, same, given = set(before), len(before) == len(records), []
        for record in records:
            account = before.get(record.id)
            if account is None or account.record.incarnation != record.incarnation:
                account, same = Account(record, now), False
            else:
                gone.remove(record.id)
                same = same and account.record.draining == record.draining
                if account.report(record, now):
                    given.append(account)
            self._accounts[record.id] = account
        if same:
            for account in self._accounts.values():
                if account.record.id in self._table.row:  # a draining worker has none
                    self._table.reported(account)
        else:
            self._rebuild()
        for account in given:
            self.given(account)
        return sorted(gone)

    def changed(self, account: Account) -> None:
        """What routers gave is another. One whose worker has left or was replaced is nobody's any more."""
        name = account.record.id
        if self._accounts.get(name) is account and name in self._table.row:
            self._table.given(account)

    def given(self, account: Account) -> None:
        """This router gave the worker something, or took it back."""
        self.changed(account)
        if self.on_given is not None and self._accounts.get(account.record.id) is account:
            self.on_given(account)

    def candidates(self, now: float, avoid: frozenset[str] = frozenset()) -> Candidates:
        """Workers that take new work; of each role, those to avoid only when there are no others."""
        if self._table.index_version != self._index.version:
            self._rebuild()
        all_ = self._table.candidates(now)
        if not avoid:
            return all_
        return Candidates(_without(all_.prefill, avoid), _without(all_.decode, avoid))

    def _rebuild(self) -> None:
        for name in self._accounts:
            self._index.join(name)  # before the table notes the index's version
        self._table = _Table([one for one in self._accounts.values() if not one.record.draining], self._index)


def _without(rows: Rows, avoid: frozenset[str]) -> Rows:
    kept = [row for row, name in enumerate(rows.names) if name not in avoid]
    return rows.only(kept) if kept and len(kept) < len(rows) else rows
