"""Fleet: how busy every live worker is, as arrays by row, so that a policy prices a thousand in one go.

Three sources say it, and none is enough alone:

    report   the worker's own, with every renewal of its lease: complete, but a fraction of a second old
    own      what this router has given it and not seen done yet
    peers    what other routers say that they have given it (`peers.py`)

Prefill work melts while a worker computes, so it is the last report, less what it has computed since at its
own rate, plus what was placed since. A decode worker keeps a request until its end, so requests and context
are the greater of the report and of what all routers know.

An account is the truth of one worker; the arrays beside it have a row rewritten when its account changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from router.index import GlobalIndex
from wire.records import Role, WorkerLoad, WorkerRecord

Floats = npt.NDArray[np.float64]
_IN_FLIGHT_S = 0.05  # a placement that much before a report may still have been on its way to the worker


@dataclass(slots=True)
class Given:
    """What one router has given one worker. Tokens unless said."""

    requests: int = 0  # rooms that decode there, or wait to
    prefills: int = 0  # rooms whose first token has not come yet
    prefill_tokens: int = 0  # of those, to compute
    context_tokens: int = 0  # of the rooms that decode there: prompt and expected output


@dataclass(slots=True)
class Account:
    """One worker: its last report, and what it has been given."""

    record: WorkerRecord
    reported_at: float
    report_number: int = 0
    own: Given = field(default_factory=Given)
    peers: Given = field(default_factory=Given)
    since_tokens: int = 0  # prefill tokens placed since the report
    promised_tokens: int = 0  # of decode's headroom, since the report
    promised_rooms: int = 0
    placed_at: float = 0.0
    placed_tokens: int = 0  # the last placements, which the next report may not have seen

    def report(self, record: WorkerRecord, now: float) -> None:
        """A View has this record; it is news if the load differs."""
        if record.load != self.record.load:
            late = self.placed_tokens if now - self.placed_at < _IN_FLIGHT_S else 0
            self.since_tokens = late
            # What was promised before the report is taken to be in it. If it is not yet, a Prefill goes out
            # early; P keeps nothing for it that it could not evict.
            self.promised_tokens = self.promised_rooms = 0
            self.reported_at = now
            self.report_number += 1
        self.record = record

    def placed(self, prefill_tokens: int, now: float) -> None:
        """It was given a prompt."""
        if now - self.placed_at >= _IN_FLIGHT_S:
            self.placed_tokens, self.placed_at = 0, now
        self.placed_tokens += prefill_tokens
        self.since_tokens += prefill_tokens

    def requests(self) -> int:
        """Requests on a decode worker."""
        load = self.record.load
        return max(load.running_requests + load.waiting_requests, self.own.requests + self.peers.requests)

    def context(self) -> int:
        """KV tokens that requests on a decode worker hold, or will."""
        load, record = self.record.load, self.record
        known = self.own.context_tokens + self.peers.context_tokens
        return max(record.total_tokens - load.free_tokens if load != _SILENT else 0, known)


_SILENT = WorkerLoad()


@dataclass(frozen=True, slots=True)
class Rows:
    """Workers of one role that take new work, as a policy sees them now. Arrays are as long as `names`."""

    names: list[str]
    slots: npt.NDArray[np.intp]  # where an index row speaks of them
    hosts: npt.NDArray[np.intp]  # equal numbers, over both roles: the same host
    queued: Floats  # prefill tokens ahead of a new prompt
    requests: Floats
    context: Floats  # KV tokens that requests hold, or will
    capacity: Floats  # KV tokens

    def __len__(self) -> int:
        return len(self.names)

    def only(self, kept: list[int]) -> Rows:
        """Some of them."""
        return Rows(
            [self.names[row] for row in kept], self.slots[kept], self.hosts[kept], self.queued[kept],
            self.requests[kept], self.context[kept], self.capacity[kept],
        )  # fmt: skip


class _Table:
    """The accounts of one role as arrays. An account that changed is `touch`ed; nothing else is copied."""

    def __init__(self, accounts: list[Account], index: GlobalIndex, hosts: dict[str, int]) -> None:
        count = len(accounts)
        self.index_version = index.version
        self.accounts = accounts
        self.row = {one.record.id: row for row, one in enumerate(accounts)}
        self.names = list(self.row)
        self.slots = np.array([index.join(name) for name in self.names], np.intp)
        self.hosts = np.array([hosts.setdefault(one.record.host, len(hosts)) for one in accounts], np.intp)
        self._reported, self._rate, self._reported_at, self._since = np.zeros((4, count))
        self._requests, self._context, self._capacity = np.zeros((3, count))
        for one in accounts:
            self.touch(one)

    def touch(self, account: Account) -> None:
        """Its figures have changed."""
        row, load = self.row[account.record.id], account.record.load
        self._reported[row] = load.queued_prefill_tokens
        self._rate[row] = load.prefill_tokens_per_s
        self._reported_at[row] = account.reported_at
        self._since[row] = account.since_tokens
        self._requests[row] = account.requests()
        self._context[row] = account.context()
        self._capacity[row] = account.record.total_tokens

    def rows(self, now: float) -> Rows:
        """What a policy sees. The arrays are the table's own: they are right until the next change."""
        left = self._reported - self._rate * (now - self._reported_at)
        queued = np.maximum(left, 0.0, out=left)
        queued += self._since
        return Rows(
            self.names, self.slots, self.hosts, queued, self._requests, self._context, self._capacity
        )  # fmt: skip


class Fleet:
    """All live workers of the model, with an account of each."""

    def __init__(self, index: GlobalIndex) -> None:
        self._index = index
        self._accounts: dict[str, Account] = {}
        self._tables: dict[Role, _Table] = {}
        self._rebuild()

    def __contains__(self, worker: str) -> bool:
        return worker in self._accounts

    def account(self, worker: str) -> Account | None:
        """A live worker's account. Call `changed` after writing to it."""
        return self._accounts.get(worker)

    def accounts(self) -> list[Account]:
        """All of them."""
        return list(self._accounts.values())

    def update(self, records: list[WorkerRecord], now: float) -> None:
        """A new View. Accounts of workers that stay are kept; a new incarnation starts a fresh one."""
        before, self._accounts = self._accounts, {}
        same = len(before) == len(records)
        for record in records:
            account = before.get(record.id)
            if account is None or account.record.incarnation != record.incarnation:
                account, same = Account(record, now), False
            else:
                same = same and account.record.draining == record.draining
                account.report(record, now)
            self._accounts[record.id] = account
        if same:
            for account in self._accounts.values():
                self.changed(account)
        else:
            self._rebuild()

    def changed(self, account: Account) -> None:
        """Somebody wrote to this account."""
        table = self._tables[account.record.role]
        if account.record.id in table.row:  # else it is draining: nobody chooses it
            table.touch(account)

    def rows(self, role: Role, now: float, avoid: frozenset[str] = frozenset()) -> Rows:
        """Workers of a role that take new work; those to avoid only when there are no others."""
        if self._tables[role].index_version != self._index.version:
            self._rebuild()
        rows = self._tables[role].rows(now)
        if avoid:
            kept = [row for row, name in enumerate(rows.names) if name not in avoid]
            if kept and len(kept) < len(rows):
                return rows.only(kept)
        return rows

    def _rebuild(self) -> None:
        hosts: dict[str, int] = {}
        for name in self._accounts:
            self._index.join(name)  # before a table notes the index's version
        for role in Role:
            there = [
                one for one in self._accounts.values() if one.record.role is role and not one.record.draining
            ]
            self._tables[role] = _Table(there, self._index, hosts)
