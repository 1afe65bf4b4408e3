"""PageShipper: a worker's way into decode workers' pools, for requests that it hands off."""

from __future__ import annotations

import queue
from collections.abc import Iterator

from common.errors import TransferError
from kvcache.page_runs import PageIds, as_pages
from kvtransfer.sender import KVSender, SenderThreads, Sent
from scheduler.req import Req
from wire.messages import KVTarget
from wire.stages import RequestStage
from worker.services import Services


class PageShipper:
    """Owns the threads that hand off, and knows which of a request's pages make up its KV.

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
        self._sent: queue.SimpleQueue[Sent] = queue.SimpleQueue()
        self._threads = SenderThreads(self._transfer.sender, self._transfer.regions, self._post)
        self._checks = options.kv_checksums

    def close(self) -> None:
        """End the threads."""
        self._threads.close()

    def open(self, target: KVTarget, decode: str, now: float) -> KVSender:
        """A sender to the target's pages. The target came from the mailbox `decode`. Raises TransferError
        when this worker cannot write there."""
        if target.layout != self._transfer.layout:
            raise TransferError(f"decode worker {target.decode} lays its pages out differently")
        endpoint = self._transfer.sender.choose(target)
        self._transfer.used(endpoint, decode, now)
        return KVSender(
            self._threads,
            target.room,
            target.epoch,
            self._page_size,
            endpoint,
            target.groups,
            self._primary,
            checks=self._checks.stricter(target.checksums),
        )

    def ship_committed(self, sender: KVSender, req: Req) -> None:
        """Send the whole pages of the primary group that are computed: nothing changes them any more."""
        end = req.kv_committed_len // self._page_size * self._page_size
        if end > sender.start_send_idx:
            req.stamp(self._stage)
            sender.send(self._primary_pages(req, end), end)

    def ship_rest(self, sender: KVSender, req: Req, end: int) -> None:
        """No forward of the request will follow here: send what has not been sent of its first `end` tokens,
        all that are computed, in every group."""
        req.stamp(self._stage)
        window = self._memory.swa
        needed_from = {} if window is None else {"window": window.needed_from(end)}
        sender.send({**self._primary_pages(req, end), **self._last_pages(req, end)}, end, True, needed_from)

    def take_sent(self) -> Iterator[Sent]:
        """What the threads have posted since the last call."""
        while not self._sent.empty():
            yield self._sent.get()

    def _post(self, sent: Sent) -> None:
        """On a transfer thread: wake the loop."""
        self._sent.put(sent)
        self._nudge()

    def _primary_pages(self, req: Req, end: int) -> dict[str, PageIds]:
        """The primary group's pages of tokens [0, end), by logical page."""
        row = self._memory.req_to_token_pool.req_to_token[req.req_pool_idx]
        return {self._primary: as_pages(row[: end : self._page_size] // self._page_size)}

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
