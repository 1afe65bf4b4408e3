"""Books: what this router has given each worker to do, beside what the worker last reported.

A worker's report is up to a lease renewal old, and a burst is decided in less; so load is the greater of the
report and of what we know ourselves.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.policy import Candidate
from wire.records import Role, WorkerRecord


@dataclass(slots=True)
class _Page:
    record: WorkerRecord
    requests: int = 0
    prefill_tokens: int = 0  # given to it, first token not seen yet
    promised_tokens: int = 0  # since its last report
    promised_rooms: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """What one epoch of one room costs its workers, to be taken off again."""

    decode: str
    prefill: str | None
    prefill_tokens: int
    prefilled: bool = False


class Books:
    """All live workers of the model, with our own account of each."""

    def __init__(self) -> None:
        self._pages: dict[str, _Page] = {}

    def update(self, records: list[WorkerRecord]) -> None:
        """A new View. Reports renew headroom; accounts of workers that stay are kept."""
        pages = {}
        for record in records:
            page = self._pages.get(record.id)
            if page is None or page.record.incarnation != record.incarnation:
                page = _Page(record)
            elif page.record.load != record.load:
                # What was promised before the report is taken to be in it. If it is not yet, a Prefill goes
                # out early; P keeps nothing for it that it could not evict.
                page.promised_tokens = page.promised_rooms = 0
            page.record = record
            pages[record.id] = page
        self._pages = pages

    def candidates(self, role: Role, hits: dict[str, int], page_tokens: int) -> list[Candidate]:
        """Workers of a role that take new work. `hits` are pages of `page_tokens` tokens each."""
        return [
            Candidate(
                page.record,
                hits.get(page.record.id, 0) * page_tokens,
                max(page.record.load.queued_prefill_tokens, page.prefill_tokens),
                max(page.record.load.running_requests + page.record.load.waiting_requests, page.requests),
            )
            for page in self._pages.values()
            if page.record.role is role and not page.record.draining
        ]

    def fits(self, decode: str, tokens: int) -> bool:
        """Whether D can, by its last report and our promises since, reserve that many tokens at once."""
        page = self._pages[decode]
        load = page.record.load
        return (
            tokens <= load.headroom_tokens - page.promised_tokens and page.promised_rooms < load.headroom_rows
        )

    def place(self, entry: Entry, tokens: int) -> None:
        """A room goes to these workers and will need `tokens` on D."""
        decode = self._pages[entry.decode]
        decode.requests += 1
        decode.promised_tokens += tokens
        decode.promised_rooms += 1
        if entry.prefill is not None:
            self._pages[entry.prefill].requests += 1
        self._pages[entry.prefill or entry.decode].prefill_tokens += entry.prefill_tokens

    def prefilled(self, entry: Entry) -> Entry:
        """The first token came."""
        if entry.prefilled:
            return entry
        page = self._pages.get(entry.prefill or entry.decode)
        if page is not None:
            page.prefill_tokens = max(0, page.prefill_tokens - entry.prefill_tokens)
            if entry.prefill is not None:
                page.requests = max(0, page.requests - 1)
        return Entry(entry.decode, entry.prefill, entry.prefill_tokens, prefilled=True)

    def close(self, entry: Entry) -> None:
        """The epoch is over. A worker that was replaced meanwhile has a fresh account, hence the floors."""
        self.prefilled(entry)
        page = self._pages.get(entry.decode)
        if page is not None:
            page.requests = max(0, page.requests - 1)

    def report(self) -> list[dict[str, object]]:
        """For /debug/workers: accounts by worker."""
        return [
            {
                "id": page.record.id,
                "requests": page.requests,
                "prefill_tokens": page.prefill_tokens,
                "promised_tokens": page.promised_tokens,
            }
            for page in self._pages.values()
        ]
