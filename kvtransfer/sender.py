"""The prefill side of a hand-off: KVSender (one per room and epoch), and the SenderPool whose threads move
the bytes, so that the engine loop never waits for a transfer."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from common.errors import TransferError
from kvtransfer.checksum import page_checksums
from kvtransfer.pages import PageIds, PageWrite, as_pages
from kvtransfer.poll import KVPoll
from kvtransfer.region import PoolRegion
from kvtransfer.transport import SenderTransport
from wire.messages import GroupTarget, TransferEndpoint

log = logging.getLogger(__name__)

_JOIN_S = 5.0


@dataclass(frozen=True)
class Sent:
    """The end of a room's sending, posted once: no source page is read after it. `error` is None when every
    page has landed; `checksums` are per group in target order (empty when switched off)."""

    room: int
    epoch: int
    kv_bytes: int
    error: str | None = None
    checksums: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Job:
    writes: list[PageWrite]
    last: bool


class KVSender:
    """One room in one epoch: ships pages as chunks are computed, each page once.

    The pages of the group that decides reuse leave in order, as soon as they are whole. `start_send_idx` is
    the first of its tokens not yet handed over; it stays on a page border until the last chunk, which takes
    the partial page along. `tmp_end_idx` is where the chunk ends that has been launched but whose result is
    not in yet. The other groups (the pages of a window, the slot of a state) are what they must be only at
    the end of the prompt, so they leave whole, after the rest of the last chunk.

    Indices belong to the owner's thread; the sending itself to one pool thread at a time.
    """

    def __init__(
        self, pool: SenderPool, room: int, epoch: int, page_size: int, primary: str = "full"
    ) -> None:
        """`primary` is the name of the group that decides reuse; its pages may have no bytes and then be
        no part of any target."""
        self.room = room
        self.epoch = epoch
        self.start_send_idx = 0
        self.tmp_end_idx: int | None = None
        self._pool = pool
        self._page_size = page_size
        self._primary = primary
        self._endpoint: TransferEndpoint | None = None
        self._targets: dict[str, tuple[int, PageIds]] = {}  # group -> (first page, page ids)
        self._lock = threading.Lock()
        self._jobs: deque[_Job] = deque()
        self._busy = False  # queued in the pool, or in one of its threads
        self._state = KVPoll.BOOTSTRAPPING
        self._error: str | None = None
        self._bytes = 0
        self._checksums: dict[str, list[int]] = {}

    def init(self, endpoint: TransferEndpoint, groups: Mapping[str, GroupTarget]) -> None:
        """The pages are known (KVTarget): tokens before the primary group's first page are on the other side
        already."""
        with self._lock:
            if self._state is not KVPoll.BOOTSTRAPPING:
                return  # a repeat, or aborted meanwhile
            self._endpoint = endpoint
            self._targets = {name: (t.first_page, as_pages(t.page_ids)) for name, t in groups.items()}
            first, _ = self._targets.get(self._primary, (0, None))
            self.start_send_idx = first * self._page_size
            self._state = KVPoll.WAITING_FOR_INPUT

    def send(self, pages: Mapping[str, PageIds], end: int | None = None, last: bool = False) -> None:
        """Tokens up to `end` (default: tmp_end_idx) are computed; hand over what was not yet.

        `pages[group][i]` is logical page i of a group in my pool, cached prefix included, 0 where there is
        none; a state has one page, its slot. Without `last` only the primary group's count. `last` comes
        once, at the end, with every group's up to the end, a partial page too. What is sent must neither
        change nor be freed before `Sent`.
        """
        end = self.tmp_end_idx if end is None else end
        assert end is not None, "no end was given and none was recorded"
        size = self._page_size
        begin_page = self.start_send_idx // size
        end_page = -(-end // size) if last else end // size
        if not last and end_page <= begin_page:
            return
        writes, problem = [], None
        try:
            writes = self._writes(pages, begin_page, end_page, last)
        except TransferError as error:
            problem = str(error)
        self.start_send_idx = end if last else end_page * size
        self.tmp_end_idx = None
        with self._lock:
            if self._state is KVPoll.FAILED:
                return
            assert self._state in (KVPoll.WAITING_FOR_INPUT, KVPoll.TRANSFERRING), (
                "not between init and the end"
            )
            if problem is not None:
                self._error, last = problem, True
                self._jobs.clear()
            self._jobs.append(_Job(writes, last))
            self._state = KVPoll.TRANSFERRING
            self._queue()

    def abort(self, reason: str) -> None:
        """Send nothing more. `Sent` is posted when the write in progress, if any, is over."""
        with self._lock:
            if self._state in (KVPoll.SUCCESS, KVPoll.FAILED):
                return
            self._error = self._error or reason
            self._jobs.clear()
            self._jobs.append(_Job([], last=True))
            self._queue()

    def poll(self) -> KVPoll:
        """Where it stands."""
        return self._state

    def _writes(
        self, pages: Mapping[str, PageIds], begin_page: int, end_page: int, last: bool
    ) -> list[PageWrite]:
        """Raises TransferError when the target wants what is not there."""
        writes = []
        for group, (first, ids) in self._targets.items():
            end = first + len(ids)
            if last and end != len(pages.get(group, ())):
                raise TransferError(
                    f"the target wants pages {first} to {end} of group {group}, which ends elsewhere"
                )
            if group == self._primary:
                low, high = max(begin_page, first), min(end_page, end)
            elif last:
                low, high = first, end
            else:
                continue
            low = min(low, high)
            src = as_pages(pages[group][low:high]).copy()
            if not src.all():  # page 0 is scratch: nobody's
                raise TransferError(f"this worker does not hold pages {low} to {high} of group {group}")
            writes.append(PageWrite(self.room, self.epoch, group, src, ids[low - first : high - first]))
        return writes

    def _queue(self) -> None:
        """Under the lock."""
        if not self._busy:
            self._busy = True
            self._pool.queue(self)

    def run_one(self) -> None:
        """On a pool thread: the next job. Nobody else runs one of this sender's meanwhile."""
        with self._lock:
            job = self._jobs.popleft()
        try:
            if self._error is None:
                self._carry_out(job)
        except TransferError as error:
            self._error = str(error)
        except Exception as error:
            log.exception("a bug while sending room %d", self.room)
            self._error = f"internal error: {error}"
        with self._lock:
            over = job.last or self._error is not None
            if over:
                self._jobs.clear()
                self._state = KVPoll.FAILED if self._error is not None else KVPoll.SUCCESS
            self._busy = False
            if self._jobs:
                self._queue()
        if over:
            self._pool.post(Sent(self.room, self.epoch, self._bytes, self._error, self._checksums))

    def _carry_out(self, job: _Job) -> None:
        assert self._endpoint is not None, "a job follows init"
        for write in job.writes:
            if self._pool.checksums:
                sums = page_checksums(self._pool.regions[write.group], write.src_pages)
                self._checksums.setdefault(write.group, []).extend(sums)
            if len(write):
                self._bytes += self._pool.transport.write(self._endpoint, write)


class SenderPool:
    """A worker's transfer threads. Rooms take turns, a chunk each; the chunks of one room go in order."""

    def __init__(
        self,
        transport: SenderTransport,
        regions: PoolRegion,
        on_sent: Callable[[Sent], None],
        threads: int = 2,
        checksums: bool = False,
    ) -> None:
        """`on_sent` is called on a transfer thread and must only post. The transport stays the caller's."""
        self.transport = transport
        self.regions = regions
        self.checksums = checksums
        self._on_sent = on_sent
        self._ready: queue.SimpleQueue[KVSender | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"kv-send-{index}", daemon=True)
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def queue(self, sender: KVSender) -> None:
        """`sender` has a job and is not queued (KVSender sees to that)."""
        self._ready.put(sender)

    def post(self, sent: Sent) -> None:
        """A room is over."""
        self._on_sent(sent)

    def close(self) -> None:
        """Let the writes in progress end, each within its own bound, and stop the threads."""
        for _ in self._threads:
            self._ready.put(None)
        for thread in self._threads:
            thread.join(_JOIN_S)

    def _run(self) -> None:
        while (sender := self._ready.get()) is not None:
            sender.run_one()
