"""PageShipper: a worker's way into decode workers' pools, for requests that it hands off."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from common.errors import TransferError
from kvcache.page_runs import PageIds, as_pages
from kvcache.tiers.reads import TierRead
from kvtransfer.sender import KVSender, SenderThreads, Sent
from scheduler.pages import Pages
from scheduler.req import Req
from wire.messages.transfer import KVTarget, TransferEndpoint
from wire.stages import RequestStage
from worker.services import Services


class _Read(NamedTuple):
    """A read of cached pages that has ended."""

    of: TierRead
    is_whole: bool


class PageShipper:
    """Owns the threads that hand off, and knows which of a request's pages make up its KV.

    What a request has no lock on is read from the tree under a lock of its own (kvcache/tiers/reads.py),
    which ends when a thread says that the pages have landed, or will not.

    All methods are called on the engine loop's thread. Threads post their results, and `take_sent` gives them
    to the loop.
    """

    def __init__(self, services: Services, stage: RequestStage) -> None:
        """A request enters `stage` when its first pages leave."""
        options = services.options
        self._transfer = services.transfer
        self._memory = services.memory
        self._page_size = options.page_size
        self._stage = stage
        self._primary = services.memory.specs[0].name
        self._nudge = services.mailbox.nudge
        self._reads = None if services.memory.tiers is None else services.memory.tiers.reads
        self._reading: set[TierRead] = set()
        self._opened: dict[tuple[int, int], TransferEndpoint] = {}  # where rooms' pages go, until their Sent
        self._sent: queue.SimpleQueue[Sent | _Read] = queue.SimpleQueue()
        self._threads = SenderThreads(
            self._transfer.sender, self._transfer.regions, self._post, arenas=self._transfer.arenas
        )
        self._checks = options.kv_checksums

    def close(self) -> None:
        """End the threads, and all reads."""
        self._threads.close()
        for read in self._reading.copy():
            self._end(_Read(read, is_whole=False))

    def open(self, target: KVTarget, decode: str, now: float) -> KVSender:
        """A sender to the target's pages. The target came from the mailbox `decode`. Raises TransferError
        when this worker cannot write there."""
        if target.layout != self._transfer.layout:
            raise TransferError(f"decode worker {target.decode} lays its pages out differently")
        endpoint = self._transfer.sender.choose(target)
        sender = KVSender(
            self._threads,
            target.room,
            target.epoch,
            self._page_size,
            endpoint,
            target.groups,
            self._primary,
            checks=self._checks.stricter(target.checksums),
        )
        self._transfer.opened(endpoint, decode, now)
        self._opened[target.room, target.epoch] = endpoint
        return sender

    def ship_committed(self, sender: KVSender, req: Req) -> None:
        """Send the whole pages of the primary group that are computed: nothing changes them any more."""
        end = req.kv_committed_len // self._page_size * self._page_size
        if end > sender.start_send_idx:
            req.stamp(self._stage)
            req.reader = sender
            sender.send(self._primary_pages(req, end), end, on_read=self._wake)

    def ship_cached(self, sender: KVSender, req: Req) -> None:
        """The request waits, and holds nothing: send what is cached of its prompt in the primary group, if a
        part of it is on the host. So that leaves while it is loaded for the forward."""
        if (
            self._reads is None
            or not self._transfer.sender.reads_host(sender.endpoint)
            or self._primary not in sender.starts
        ):
            return
        start = sender.start_send_idx // self._page_size
        read = self._reads.begin(Pages.key(req, req.input_len), start)
        if read is not None:
            req.stamp(self._stage)
            self._send_read(sender, read, last=False)

    def ship_parked(self, sender: KVSender, req: Req) -> bool:
        """The request is prefilled, and holds nothing: send its KV from where it lies on device and host.
        False, and nothing is sent, if a part of it must be computed again, or loaded to be sent."""
        if self._reads is None or not self._transfer.sender.reads_host(sender.endpoint):
            return False
        read = self._reads.begin_whole(Pages.key(req, req.input_len), sender.starts)
        if read is not None:
            req.stamp(self._stage)
            self._send_read(sender, read, last=True)
        return read is not None

    def _send_read(self, sender: KVSender, read: TierRead, last: bool) -> None:
        self._reading.add(read)
        end = read.pages * self._page_size
        here, below = (
            {group: as_pages(ids) for group, ids in tier.items()} for tier in (read.device, read.host)
        )
        sender.send(here, end, last, self._needed_from(end), below, partial(self._post_read, read))

    def ship_rest(self, sender: KVSender, req: Req, end: int) -> None:
        """No forward of the request will follow here: send what has not been sent of its first `end` tokens,
        all that are computed, in every group."""
        req.stamp(self._stage)
        req.reader = sender
        pages = {**self._primary_pages(req, end), **self._last_pages(req, end)}
        sender.send(pages, end, True, self._needed_from(end))

    def take_sent(self, now: float) -> Iterator[Sent]:
        """What the threads have posted since the last call."""
        while not self._sent.empty():
            posted = self._sent.get()
            if isinstance(posted, Sent):
                self._transfer.closed(self._opened.pop((posted.room, posted.epoch)), now)
                yield posted
            else:
                self._end(posted)

    def _end(self, read: _Read) -> None:
        assert self._reads is not None, "a read without tiers"
        self._reading.remove(read.of)
        self._reads.end(*read)

    def _post_read(self, read: TierRead, is_whole: bool) -> None:
        """On any thread: nothing of it is read any more."""
        self._post(_Read(read, is_whole))

    def _post(self, sent: Sent | _Read) -> None:
        """On a transfer thread: wake the loop."""
        self._sent.put(sent)
        self._nudge()

    def _wake(self, landed: bool) -> None:  # noqa: ARG002 - if they have not, Sent is posted
        """On any thread: pages that the scheduler frees when they are not read any more are not."""
        self._nudge()

    def _primary_pages(self, req: Req, end: int) -> dict[str, PageIds]:
        """The primary group's pages of tokens [0, end), by logical page."""
        row = self._memory.req_to_token_pool.req_to_token[req.req_pool_idx]
        return {self._primary: as_pages(row[: end : self._page_size] // self._page_size)}

    def _needed_from(self, end: int) -> dict[str, int]:
        """By group, the first page that a query at position `end` needs, unless it needs all."""
        window = self._memory.swa
        return {} if window is None else {"window": window.needed_from(end)}

    def _last_pages(self, req: Req, end: int) -> dict[str, PageIds]:
        """What a query at position `end` needs of the other groups, by logical page."""
        pages: dict[str, PageIds] = {}
        window, state = self._memory.swa, req.state_hold
        if window is not None:
            pages["window"] = as_pages(window.table[req.req_pool_idx, : window.pages_of(end)])
        if state is not None:
            assert state.live_len == end, f"{req} has the state after {state.live_len} tokens, not {end}"
            pages["state"] = as_pages([state.live])
        return pages
