"""RequestTable: every request the scheduler knows, and where it stands."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator

import numpy as np

from kvcache.allocator import NO_SLOTS
from kvcache.balance import OutOfBalance
from kvcache.memory import GroupPages, MemoryReport
from scheduler.fetches import Fetches
from scheduler.pages import Pages
from scheduler.queue import WaitingQueue
from scheduler.req import Req, ReqState
from scheduler.reservations import Reservations
from scheduler.running import RunningBatch

HOLDING = frozenset({
    ReqState.PREFILL, ReqState.RUNNING, ReqState.RESERVED, ReqState.TRANSFERRED, ReqState.PAUSED,
    ReqState.HANDED_OFF,
})  # fmt: skip
"""States in which a request has a row and slots."""


class RequestTable:
    """Moves requests between the queue, the batch and the policy; none is ever in two places or in none."""

    def __init__(self, pages: Pages, running: RunningBatch) -> None:
        self.pages = pages
        self.reservations = Reservations(pages)
        self.fetches = Fetches(pages)
        self.running = running
        self.waiting = WaitingQueue()
        self.compiling: list[Req] = []  # wait for their grammars, or for storage; they are queued after that
        self.fetching: list[Req] = []  # they wait for pages from another worker; they are queued after that
        self.transferred: deque[Req] = deque()  # their KV is here; they wait for the decode batch
        self.chunked: Req | None = None  # the one request whose prefill has begun and has chunks left
        self.live: dict[tuple[int, int], Req] = {}  # (room, epoch) -> a request that is not DONE
        self.leaving: dict[int, Req] = {}  # by id(): released when their forwards have landed
        self.lately_over: deque[tuple[int, int]] = deque(maxlen=64)  # (room, epoch) since memory balanced

    # -- views -------------------------------------------------------------------------------------

    def holders(self) -> Iterator[Req]:
        """Live requests with memory."""
        return (req for req in self.live.values() if req.state in HOLDING)

    def is_alone(self) -> bool:
        """Whether no request holds memory: then a request that waits may take all of it."""
        return not self.leaving and next(self.holders(), None) is None

    def count(self, *states: ReqState) -> int:
        """Live requests in one of these states."""
        return sum(req.state in states for req in self.live.values())

    def place(self, req: Req) -> int:
        """How many requests are ahead of this one, where it waits."""
        if req.state is ReqState.WAITING:
            return self.waiting.place(req)
        return self.transferred.index(req) if req in self.transferred else 0

    def held_rows(self) -> set[int]:
        """Rows in use."""
        everyone = (*self.live.values(), *self.leaving.values())
        return {req.req_pool_idx for req in everyone if req.req_pool_idx is not None}

    def held_pages(self) -> GroupPages:
        """By group: pages outside the tree that requests or fetches hold, or that wait for a forward to
        land."""
        everyone = {id(req): req for req in (*self.live.values(), *self.leaving.values())}.values()
        held = [*self.pages.deferred.pages(), *self.fetches.pages(), *map(self.pages.private_pages, everyone)]
        return {
            name: np.concatenate([NO_SLOTS, *(pages[name] for pages in held if name in pages)])
            for name in self.pages.memory.kv_caches
        }

    def check_slices(self) -> Generator[None, None, MemoryReport]:
        """Balance every pool against everything that is held here. Raises OutOfBalance, which names the
        requests that hold what is wrong, and those that may have lost it. See Memory.check_slices."""
        try:
            report = yield from self.pages.memory.check_slices(self.held_pages(), self.held_rows())
        except OutOfBalance as error:
            who = self._holders(error)
            raise OutOfBalance(error.of, error.numbers, f"{error}; {who}") from error
        self.lately_over.clear()
        return report

    def _holders(self, error: OutOfBalance) -> str:
        wrong = set(error.numbers.tolist())
        holders = []
        for req in (*self.live.values(), *self.leaving.values()):
            if error.of == "rows":
                own = {req.req_pool_idx}
            else:
                own = set(self.pages.private_pages(req).get(error.of, NO_SLOTS).tolist())
            if wrong & own:
                holders.append(f"{req.room}.{req.epoch}")
        over = [f"{room}.{epoch}" for room, epoch in self.lately_over]
        return f"held by rooms {holders}; over since the last check that balanced: rooms {over}"

    # -- moves -------------------------------------------------------------------------------------

    def enrol(self, req: Req) -> None:
        """Make a new or parked request live."""
        key = (req.room, req.epoch)
        assert req.state in (ReqState.NEW, ReqState.PARKED), f"{req} is known already"
        assert key not in self.live, f"room {req.room}.{req.epoch} is live already"
        self.live[key] = req

    def queue_compiled(self) -> None:
        """Queue those of `compiling` that need wait no longer."""
        for req in self.compiling.copy():
            if not req.sampling.is_ready or self.pages.lower.awaits_storage(req):
                continue
            self.compiling.remove(req)
            self.wait(req)

    def wait(self, req: Req, kv_only: bool = False) -> None:
        """Queue a live request, to be prefilled as far as its tokens are known (see Req.aim_prefill)."""
        req.aim_prefill(kv_only)
        req.state = ReqState.WAITING
        self.waiting.push(req)

    def detach(self, req: Req) -> None:
        """Remove the request from the queue or batch that it is in."""
        self.pages.lower.forget(req)
        if req.running_index >= 0:
            self.running.leave(req)
        for line in (self.compiling, self.fetching):
            if req in line:
                line.remove(req)
        if req.state is ReqState.WAITING:
            self.waiting.remove(req)
        elif req.state is ReqState.TRANSFERRED and req in self.transferred:
            self.transferred.remove(req)
        if self.chunked is req:
            self.chunked = None

    def close(self, req: Req, is_insert: bool) -> None:
        """Release the request's memory, now or when the last forward with it has landed."""
        if req.in_flight:
            req.closing = is_insert
            self.leaving[id(req)] = req
        elif req.req_pool_idx is not None:
            self.pages.release(req, is_insert)

    def landed(self, req: Req) -> bool:
        """One of its forwards has landed. Whether what it computed is still wanted."""
        req.in_flight -= 1
        if req.closing is None:
            return req.state is ReqState.PREFILL or req.state is ReqState.RUNNING
        if req.in_flight == 0:
            is_insert, req.closing = req.closing, None
            del self.leaving[id(req)]
            self.close(req, is_insert)
        return False

    def end(self, req: Req, is_insert: bool = True) -> None:
        """End the request. Idempotent."""
        if req.state is ReqState.DONE:
            return
        self.detach(req)
        self.lately_over.append((req.room, req.epoch))
        req.state = ReqState.DONE
        if self.live.get((req.room, req.epoch)) is req:
            del self.live[(req.room, req.epoch)]
        self.close(req, is_insert)

    def retract(self, req: Req) -> None:
        """Release its memory and queue it ahead of new requests. Its KV stays in the tree, evictable."""
        assert req.in_flight == 0, f"{req} is in a launched forward"
        kv_only = req.is_kv_only
        self.detach(req)
        self.close(req, is_insert=True)
        req.resumed = True
        req.retractions += 1
        self.wait(req, kv_only)

    def pause(self, req: Req) -> None:
        """Take a decoding request out of the batch. It keeps its memory, in which nothing changes."""
        assert req.in_flight == 0, f"{req} is in a launched forward"
        self.detach(req)
        req.state = ReqState.PAUSED
        if req.state_hold is not None:  # no forward changes the state now, so its length is known again
            req.state_hold.live_len = req.kv_committed_len

    def resume(self, req: Req) -> None:
        """Let a paused request decode again, before those that have not decoded yet."""
        assert req.state is ReqState.PAUSED, f"{req} is not paused"
        req.resumed = True
        req.state = ReqState.TRANSFERRED
        self.transferred.appendleft(req)

    def park(self, req: Req) -> None:
        """Forget a handed-off request and release its memory. Its KV stays in the tree, evictable."""
        assert req.state is ReqState.HANDED_OFF, f"{req} is not handed off"
        del self.live[(req.room, req.epoch)]
        self.close(req, is_insert=True)
        req.state = ReqState.PARKED
        req.resumed = True
