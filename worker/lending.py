"""Lending: pages of this worker's tree that another worker copies.

    Fetch ──matched and locked──> a transfer thread writes ──> unlocked, Fetched
      └──absent, busy, different, unreachable──> FetchRefused, at once

It never allocates, and waits for nothing. Pages stay locked until their write has ended, also when the
requester has given the fetch up. A repeated Fetch is answered like the first.
"""

from __future__ import annotations

import queue
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.errors import TransferError, WireError
from kvcache.base_prefix_cache import MatchResult
from kvcache.memory import Memory
from kvcache.page_runs import PageIds, as_pages
from kvcache.radix_key import Namespace, RadixKey
from kvtransfer.sender import KVSender, SenderThreads, Sent
from scheduler.metrics import SchedulerMetrics
from wire.codec import unpack_tokens
from wire.holds import Hold
from wire.messages import FETCH_EPOCH, Fetch, Fetched, FetchRefused, GroupTarget, RefusalCause
from wire.peer_monitors import PeerState
from worker.services import Services

_THREADS = 2  # a stopped requester holds one of them
_MOST_TO_ONE = 4  # loans to one requester at a time
_ANSWER_S = 30.0  # how long an answer is kept for a repeat of its question


class _Refusal(Exception):
    """Nothing is lent."""

    def __init__(self, cause: RefusalCause, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause


@dataclass(slots=True, eq=False)
class _Loan:
    """Pages that are being written to a requester: the first `pages` of a prefix, locked."""

    requester: str  # mailbox
    match: MatchResult
    pages: int
    window: npt.NDArray[np.int32]  # locked window pages
    sender: KVSender
    since: float

    @property
    def digest(self) -> bytes:
        """The full digest of the last page."""
        node = self.match.last_device_node
        assert node is not None, "a loan is not empty"
        size = node.num_tokens // node.num_pages
        return node.page_digests(size)[-1]


class Lending:
    """All loans of one worker, by transfer. Engine loop's thread only."""

    def __init__(self, services: Services, metrics: SchedulerMetrics) -> None:
        self._services = services
        self._metrics = metrics
        self._memory: Memory = services.memory
        self._page_size = services.memory.page_size
        self._primary = services.memory.specs[0].name
        self._most_pages = int(services.options.peer_lend_share * services.memory.num_pages)
        self._loans: dict[int, _Loan] = {}
        self._answers: dict[tuple[str, int], tuple[Fetched | FetchRefused, float]] = {}
        self._sent: queue.SimpleQueue[Sent] = queue.SimpleQueue()
        transfer = services.transfer
        self._threads = SenderThreads(transfer.sender, transfer.regions, self._post, _THREADS)

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
        """End the threads."""
        self._threads.close()

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
                raise _Refusal(RefusalCause.BUSY, "another worker has a transfer of that number")
            self._lend(requester, fetch, now)
        except _Refusal as refusal:
            self._answer(requester, FetchRefused(fetch.transfer, refusal.cause, str(refusal)), now)

    def on_peer(self, mailbox: str, state: PeerState) -> None:
        """A requester that is down is written nothing more."""
        if state is PeerState.DOWN:
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
        """Lock what is here of the prefix and hand it to a thread. Raises _Refusal."""
        key, services = self._key(fetch), self._services
        match = self._memory.cache.match_prefix(key)
        pages = len(match.device_indices) // self._page_size
        if pages * self._page_size <= fetch.have:
            raise _Refusal(RefusalCause.ABSENT, f"{pages} pages of it are here")
        self._check_share(requester, pages)
        try:
            endpoint = services.transfer.sender.choose(fetch)
        except TransferError as error:
            raise _Refusal(RefusalCause.UNREACHABLE, str(error)) from None
        services.transfer.used(endpoint, requester, now)
        sender = KVSender(
            self._threads,
            fetch.transfer,
            FETCH_EPOCH,
            self._page_size,
            endpoint,
            self._targets(fetch, pages),
            self._primary,
            services.options.kv_checksums.stricter(fetch.checksums),
        )
        window = self._lock(match, pages)
        self._loans[fetch.transfer] = _Loan(requester, match, pages, window, sender, now)
        sent: dict[str, PageIds] = {
            self._primary: as_pages(match.device_indices[:: self._page_size] // self._page_size),
            **{name: as_pages(part) for name, part in match.parts.items()},
        }
        sender.send(sent, pages * self._page_size, True, {"window": self._window_from(pages)})

    def _key(self, fetch: Fetch) -> RadixKey:
        """What the tree knows the prefix by. Raises _Refusal."""
        transfer, page = self._services.transfer, self._page_size
        namespace = Namespace(self._services.options.model_name, fetch.extra_key, fetch.cache_salt)
        try:
            tokens = unpack_tokens(fetch.tokens)
        except WireError as error:
            raise _Refusal(RefusalCause.DIFFERENT, str(error)) from None
        if (fetch.fingerprint, fetch.layout) != (transfer.fingerprint, transfer.layout):
            raise _Refusal(RefusalCause.DIFFERENT, "its KV is of another model, or laid out otherwise")
        if namespace.seed != fetch.seed or len(tokens) % page or set(fetch.groups) != set(transfer.regions):
            raise _Refusal(RefusalCause.DIFFERENT, "it names its pages otherwise")
        return RadixKey(tokens, namespace, fetch.tenant)

    def _check_share(self, requester: str, pages: int) -> None:
        """Raises _Refusal when too much would be locked."""
        if sum(loan.pages for loan in self._loans.values()) + pages > self._most_pages:
            raise _Refusal(RefusalCause.BUSY, "as many pages as may be lent are lent")
        if sum(loan.requester == requester for loan in self._loans.values()) >= _MOST_TO_ONE:
            raise _Refusal(RefusalCause.BUSY, "as much as may be lent to one worker is lent to it")

    def _targets(self, fetch: Fetch, pages: int) -> dict[str, GroupTarget]:
        """Where a prefix of `pages` pages goes. A window's pages are the last ones of it."""
        targets = dict(fetch.groups)
        if "window" in targets:
            ids = targets["window"].page_ids
            targets["window"] = GroupTarget(max(pages - len(ids), 0), ids)
        return targets

    def _window_from(self, pages: int) -> int:
        swa = self._memory.swa
        return 0 if swa is None else swa.needed_from(pages * self._page_size)

    def _lock(self, match: MatchResult, pages: int) -> npt.NDArray[np.int32]:
        """Returns the window pages that are locked besides the node."""
        self._memory.cache.inc_lock_ref(match.last_device_node)
        window = match.part("window")[self._window_from(pages) :]
        if self._memory.swa is not None:
            self._memory.swa.locks.lock(window)
        return window

    def _written(self, sent: Sent, now: float) -> None:
        """No page of the loan is read any more."""
        loan = self._loans.pop(sent.room)
        if sent.error is None:
            answer: Fetched | FetchRefused = Fetched(
                sent.room, loan.pages, loan.digest, sent.kv_bytes, sent.checksums
            )
            self._metrics.lent_bytes += sent.kv_bytes
            self._metrics.lent_pages += loan.pages
        else:
            answer = FetchRefused(sent.room, RefusalCause.UNREACHABLE, sent.error)
        if self._memory.swa is not None:
            self._memory.swa.locks.unlock(loan.window)
        self._memory.cache.dec_lock_ref(loan.match.last_device_node)
        self._answer(loan.requester, answer, now)

    def _answer(self, requester: str, answer: Fetched | FetchRefused, now: float) -> None:
        self._answers[requester, answer.transfer] = answer, now + _ANSWER_S
        self._services.mailbox.send(requester, answer)

    def _post(self, sent: Sent) -> None:
        """On a transfer thread: wake the loop."""
        self._sent.put(sent)
        self._services.mailbox.nudge()
