"""Lending: pages of this worker's tree that another worker copies.

    Fetch ──matched and locked──> a transfer thread writes ──> unlocked, Fetched
      └──absent, busy, different, unreachable──> FetchRefused, at once

What is on the host alone is written from there, without a load, where the transport can. Nothing is
allocated, and nothing waited for. Pages stay locked (worker/lent_prefixes.py) until their write has ended,
also when the requester has given the fetch up. A repeated Fetch is answered like the first.
"""

from __future__ import annotations

import queue
from dataclasses import dataclass

from common.errors import TransferError, WireError
from kvcache.radix_key import Namespace, RadixKey
from kvcache.second_chances import give_chances
from kvtransfer.sender import KVSender, SenderThreads, Sent
from scheduler.scheduler import Scheduler
from wire.codec import unpack_tokens
from wire.holds import Hold
from wire.messages.transfer import FETCH_EPOCH, Fetch, Fetched, FetchRefused, RefusalCause
from worker.lent_prefixes import LentPrefix, LentPrefixes, NotLent, placed
from worker.services import Services

_THREADS = 2  # a stopped requester holds one of them
_MOST_TO_ONE = 4  # loans to one requester at a time
_ANSWER_S = 30.0  # how long an answer is kept for a repeat of its question


@dataclass(slots=True, eq=False)
class _Loan:
    """Pages that are being written to a requester."""

    requester: str  # mailbox
    lent: LentPrefix
    sender: KVSender
    since: float


class Lending:
    """All loans of one worker, by transfer. Engine loop's thread only."""

    def __init__(self, services: Services, scheduler: Scheduler, second_chances: bool) -> None:
        """`second_chances`: what was lent is evicted later (kvcache/second_chances.py)."""
        self._second_chances = second_chances
        self._services = services
        self._metrics = scheduler.metrics
        self._page_size = services.memory.page_size
        self._primary = services.memory.specs[0].name
        self._prefixes = LentPrefixes(
            services.memory, services.options.peer_lend_share, scheduler.spare_window_pages
        )
        self._loans: dict[int, _Loan] = {}
        self._answers: dict[tuple[str, int], tuple[Fetched | FetchRefused, float]] = {}
        self._sent: queue.SimpleQueue[Sent] = queue.SimpleQueue()
        transfer = services.transfer
        self._threads = SenderThreads(
            transfer.sender, transfer.regions, self._post, _THREADS, transfer.arenas
        )

    def __len__(self) -> int:
        return len(self._loans)

    @property
    def requesters(self) -> frozenset[str]:
        """The mailboxes of workers to which pages are being written."""
        return frozenset(loan.requester for loan in self._loans.values())

    def holds(self, now: float) -> list[Hold]:
        """The locked pages. They have no deadline of their own: the transport bounds each write."""
        return [
            Hold(
                self._services.worker_id,
                "lent pages",
                loan.requester,
                transfer,
                FETCH_EPOCH,
                now - loan.since,
            )
            for transfer, loan in self._loans.items()
        ]

    def close(self) -> None:
        """End the threads, and all loans."""
        self._threads.close()
        for loan in self._loans.values():
            self._prefixes.unlock(loan.lent, is_whole=False)
        self._loans.clear()

    def on_fetch(self, requester: str, fetch: Fetch, now: float) -> None:
        """Another worker asks for pages: begin to write them, or refuse."""
        answered = self._answers.get((requester, fetch.transfer))
        if answered is not None:
            self._services.mailbox.send(requester, answered[0])
            return
        loan = self._loans.get(fetch.transfer)
        if loan is not None and loan.requester == requester:
            return  # a repeat
        try:
            if loan is not None:
                raise NotLent(RefusalCause.BUSY, "another worker has a transfer of that number")
            self._lend(requester, fetch, now)
        except NotLent as refusal:
            self._answer(requester, FetchRefused(fetch.transfer, refusal.cause, str(refusal)), now)

    def on_lost(self, mailbox: str) -> None:
        """A requester that has gone down is written nothing more."""
        for loan in self._loans.values():
            if loan.requester == mailbox:
                loan.sender.abort("the requester is down")

    def poll(self, now: float) -> None:
        """Unlock what has been written, and say so."""
        while not self._sent.empty():
            self._written(self._sent.get(), now)

    def sweep(self, now: float) -> None:
        """Forget answers that nobody asks for again."""
        for key in [key for key, (_, until) in self._answers.items() if now >= until]:
            del self._answers[key]

    # -- one loan ----------------------------------------------------------------------------------

    def _lend(self, requester: str, fetch: Fetch, now: float) -> None:
        """Lock what is here of the prefix and hand it to a thread. Raises NotLent."""
        key, services = self._key(fetch), self._services
        if sum(loan.requester == requester for loan in self._loans.values()) >= _MOST_TO_ONE:
            raise NotLent(RefusalCause.BUSY, "as much as may be lent to one worker is lent to it")
        pool = services.transfer.sender
        try:
            endpoint = pool.choose(fetch)
        except TransferError as error:
            raise NotLent(RefusalCause.UNREACHABLE, str(error)) from None
        lent = self._prefixes.lock(key, fetch.have, fetch.groups, pool.reads_host(endpoint))
        sender = KVSender(
            self._threads,
            fetch.transfer,
            FETCH_EPOCH,
            self._page_size,
            endpoint,
            placed(fetch.groups, lent.pages),
            self._primary,
            services.options.kv_checksums.stricter(fetch.checksums),
        )
        services.transfer.opened(endpoint, requester, now)
        self._loans[fetch.transfer] = _Loan(requester, lent, sender, now)
        end, needed_from = lent.pages * self._page_size, {"window": self._prefixes.window_from(lent.pages)}
        sender.send(lent.device, end, True, needed_from, lent.host)

    def _key(self, fetch: Fetch) -> RadixKey:
        """What the tree knows the prefix by. Raises NotLent."""
        transfer, page = self._services.transfer, self._page_size
        namespace = Namespace(self._services.options.model_name, fetch.extra_key, fetch.cache_salt)
        try:
            tokens = unpack_tokens(fetch.tokens)
        except WireError as error:
            raise NotLent(RefusalCause.DIFFERENT, str(error)) from None
        if (fetch.fingerprint, fetch.layout) != (transfer.fingerprint, transfer.layout):
            raise NotLent(RefusalCause.DIFFERENT, "its KV is of another model, or laid out otherwise")
        if namespace.seed != fetch.seed or len(tokens) % page or set(fetch.groups) != set(transfer.regions):
            raise NotLent(RefusalCause.DIFFERENT, "it names its pages otherwise")
        return RadixKey(tokens, namespace, fetch.tenant, fetch.marks)

    def _written(self, sent: Sent, now: float) -> None:
        """No page of the loan is read any more."""
        loan = self._loans.pop(sent.room)
        self._services.transfer.closed(loan.sender.endpoint, now)
        if sent.error is None:
            answer: Fetched | FetchRefused = Fetched(
                sent.room, loan.lent.pages, loan.lent.digest, sent.kv_bytes, sent.checksums
            )
            self._metrics.lent_bytes += sent.kv_bytes
            self._metrics.lent_pages += loan.lent.pages
            if self._second_chances:
                give_chances(loan.lent.last)
        else:
            answer = FetchRefused(sent.room, RefusalCause.UNREACHABLE, sent.error)
        self._prefixes.unlock(loan.lent, is_whole=sent.error is None)
        self._answer(loan.requester, answer, now)

    def _answer(self, requester: str, answer: Fetched | FetchRefused, now: float) -> None:
        self._answers[requester, answer.transfer] = answer, now + _ANSWER_S
        self._services.mailbox.send(requester, answer)

    def _post(self, sent: Sent) -> None:
        """On a transfer thread: wake the loop."""
        self._sent.put(sent)
        self._services.mailbox.nudge()
