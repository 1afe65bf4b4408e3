"""The prefill side of a hand-off: a KVSender per room and epoch, and the SenderThreads that move the bytes.

The engine loop never waits for a transfer.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from common.errors import TransferError
from kvcache.page_runs import PageIds, as_pages
from kvtransfer.checksum import checksums, samples
from kvtransfer.pages import PageWrite
from kvtransfer.region import NO_REGIONS, PoolRegion
from kvtransfer.transport import SenderTransport
from wire.checksums import NO_CHECKSUMS, ChecksumMode, PageChecksums
from wire.messages.transfer import GroupTarget, TransferEndpoint

log = logging.getLogger(__name__)

_JOIN_S = 5.0


@dataclass(frozen=True)
class Sent:
    """A room's sending is over: no source page is read after this. Posted once per KVSender.

    `error` is None when every page has landed. `aborted`: this side ended it, and the other did its part.
    """

    room: int
    epoch: int
    kv_bytes: int
    error: str | None = None
    aborted: bool = False
    checksums: PageChecksums = NO_CHECKSUMS


OnRead = Callable[[bool], None]
"""Called once, on any thread, when pages that were to be sent are not read any more: whether all have
landed."""


def _nobody(landed: bool) -> None:
    """Who is told that pages of a request, which has them until `Sent`, have landed."""


@dataclass(frozen=True)
class _Job:
    writes: list[PageWrite]
    last: bool
    on_read: OnRead = _nobody


class KVSender:
    """One room in one epoch: sends pages while chunks are computed, each page once.

    The pages of the primary group leave in order, as soon as they are whole. `start_send_idx` is the first
    of its tokens that has not been sent; it stays on a page border until the last chunk, which includes the
    partial page. The other groups (the pages of a window, the slot of a state) have their final content only
    at the end of the prompt, so all of them leave after the primary group's last page.

    `start_send_idx` belongs to the owner's thread. Bytes are moved by one transfer thread at a time.
    """

    def __init__(
        self,
        threads: SenderThreads,
        room: int,
        epoch: int,
        page_size: int,
        endpoint: TransferEndpoint,
        groups: Mapping[str, GroupTarget],
        primary: str = "full",
        checks: ChecksumMode = ChecksumMode.NONE,
    ) -> None:
        """`endpoint` and `groups` are a KVTarget's, `checks` what was agreed with it.

        The tokens before the first page of `primary`, the primary group, are on the other side already. A
        primary group without bytes is in no target.
        """
        self.room = room
        self.epoch = epoch
        self.receiver = endpoint.address  # whose turn it is when this sender runs
        self._threads = threads
        self._page_size = page_size
        self._primary = primary
        self.endpoint = endpoint
        self._targets = {name: (t.first_page, as_pages(t.page_ids)) for name, t in groups.items()}
        first, _ = self._targets.get(primary, (0, None))
        self.start_send_idx = first * page_size
        self._lock = threading.Lock()
        self._jobs: deque[_Job] = deque()
        self._busy = False  # queued for a thread, or in one
        self._over = False  # Sent is posted, or about to be
        self._error: str | None = None
        self._aborted = False
        self._bytes = 0
        self._checksums = PageChecksums(checks, {name: [] for name in groups if checks.is_on})
        self._samples = {
            name: samples(checks, room, epoch, len(ids), threads.regions[name].page_bytes)
            for name, (_, ids) in self._targets.items()
            if checks.is_on
        }

    @property
    def starts(self) -> dict[str, int]:
        """By group, the first page that the other side lacks."""
        return {name: first for name, (first, _) in self._targets.items()}

    @property
    def idle(self) -> bool:
        """Whether everything that was given to `send` so far has landed, or nothing more will."""
        with self._lock:
            return not self._busy

    def send(
        self,
        pages: Mapping[str, PageIds],
        end: int,
        last: bool = False,
        needed_from: Mapping[str, int] = MappingProxyType({}),
        on_host: Mapping[str, PageIds] = MappingProxyType({}),
        on_read: OnRead = _nobody,
    ) -> None:
        """The KV of tokens [0, end) is computed: send what has not been sent.

        `pages[group][i]` is logical page i of a group in this worker's pool, cached prefix included, 0 where
        there is none; a state group has one page, its slot. Without `last` only whole pages of the primary
        group are sent. `last` is given once, at the end of the prompt, with the pages of every group; pages
        before `needed_from[group]` are left out then. After an abort or a failure nothing is sent.

        Where `pages` has a 0, the page is read in the host tier, as `on_host[group][i]`. What is sent must
        neither change nor be freed before `on_read` is called, or before `Sent`, unless `abort` is called
        first.
        """
        size = self._page_size
        begin_page = self.start_send_idx // size
        end_page = -(-end // size) if last else end // size
        if not last and end_page <= begin_page:
            on_read(True)
            return
        writes, problem = [], None
        try:
            writes = self._writes(pages, on_host, begin_page, end_page, last, needed_from)
        except TransferError as error:
            problem = str(error)
        self.start_send_idx = end if last else end_page * size
        with self._lock:
            if self._error is not None:
                on_read(False)
                return
            assert not self._over, f"room {self.room} has been sent already"
            if problem is not None:
                self._error, last = problem, True
                self._drop_jobs()
            self._jobs.append(_Job(writes, last, on_read))
            self._queue()

    def abort(self, reason: str) -> None:
        """Send nothing more. `Sent` is posted when the write in progress, if any, is over."""
        with self._lock:
            if self._over:
                return
            self._aborted = self._aborted or self._error is None
            self._error = self._error or reason
            self._drop_jobs()
            self._jobs.append(_Job([], last=True))
            self._queue()

    def _drop_jobs(self) -> None:
        """Forget what no thread has begun. The caller holds the lock."""
        while self._jobs:
            self._jobs.popleft().on_read(False)

    def _writes(
        self,
        pages: Mapping[str, PageIds],
        on_host: Mapping[str, PageIds],
        begin_page: int,
        end_page: int,
        last: bool,
        needed_from: Mapping[str, int],
    ) -> list[PageWrite]:
        """The writes of pages [begin_page, end_page). Raises TransferError for a target that is too small. It
        may be larger: it leaves room for tokens that did not come."""
        writes = []
        for group, (first, ids) in self._targets.items():
            end = first + len(ids)
            there = len(pages.get(group, ()))
            if last and (not there or end < there):
                raise TransferError(f"the target ends at page {end} of group {group}, which has {there}")
            if group == self._primary:
                low, high = max(begin_page, first), min(end_page, end)
            elif last:
                low, high = max(first, needed_from.get(group, 0)), min(there, end)
            else:
                continue
            low = min(low, high)
            src, dst = as_pages(pages[group][low:high]).copy(), ids[low - first : high - first]
            below = src == 0  # page 0 is scratch
            if below.any() and group in on_host:
                src[below] = on_host[group][low:high][below]
            if not src.all():
                raise TransferError(f"this worker does not hold pages {low} to {high} of group {group}")
            for begin, stop in _stretches(below):
                part = slice(begin, stop)
                writes.append(
                    PageWrite(self.room, self.epoch, group, src[part], dst[part], bool(below[begin]))
                )
        return writes

    def _queue(self) -> None:
        """Queue this sender for a thread unless it is queued. The caller holds the lock."""
        if not self._busy:
            self._busy = True
            self._threads.queue(self)

    def run_one(self) -> None:
        """Carry out the next job, on a transfer thread. No other thread runs one of this sender meanwhile."""
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
        with self._lock:  # so that who is told finds this sender idle, if this was its last job
            job.on_read(self._error is None)
            over = self._over = job.last or self._error is not None
            if over:
                self._drop_jobs()
            self._busy = False
            if self._jobs:
                self._queue()
        if over:
            sent = Sent(
                self.room, self.epoch, self._bytes, self._error, self._aborted, checksums=self._checksums
            )
            self._threads.post(sent)

    def _carry_out(self, job: _Job) -> None:
        for write in job.writes:
            self._check(write)
            if len(write):
                self._bytes += self._threads.transport.write(self.endpoint, write)

    def _check(self, write: PageWrite) -> None:
        """Compute the checksums that cover a page of this write, before anything else can change it."""
        if not self._checksums.mode.is_on or not len(write):
            return
        _, ids = self._targets[write.group]
        start = int(np.flatnonzero(ids == write.dst_pages[0])[0])
        end = start + len(write)
        wanted = [
            sample._replace(page=sample.page - start)
            for sample in self._samples[write.group]
            if start <= sample.page < end
        ]
        regions = self._threads.arenas if write.on_host else self._threads.regions
        sums = checksums(regions[write.group], write.src_pages, wanted)
        self._checksums.sums[write.group].extend(sums)


def _stretches(flags: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Maximal stretches of equal flags, half-open."""
    borders = (np.flatnonzero(flags[1:] != flags[:-1]) + 1).tolist()
    return list(pairwise([0, *borders, len(flags)])) if len(flags) else []


class SenderThreads:
    """A worker's transfer threads. Rooms take turns, one chunk each; a room's chunks are sent in order.

    One receiver gets at most half of the threads: a stopped one holds them until it is found to be down.
    """

    def __init__(
        self,
        transport: SenderTransport,
        regions: PoolRegion,
        on_sent: Callable[[Sent], None],
        threads: int = 4,
        arenas: PoolRegion = NO_REGIONS,
    ) -> None:
        """Pages are read in `regions`, and those of the host tier in `arenas`. `on_sent` is called on a
        transfer thread and must not block. The caller closes the transport."""
        self.transport = transport
        self.regions = regions
        self.arenas = arenas
        self._on_sent = on_sent
        self._ready: queue.SimpleQueue[KVSender | None] = queue.SimpleQueue()
        self._per_receiver = max(1, threads // 2)
        self._busy: Counter[str] = Counter()  # threads, or places in the queue for one, by receiver
        self._waiting: dict[str, deque[KVSender]] = {}  # for those of their receiver
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, name=f"kv-send-{index}", daemon=True)
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def queue(self, sender: KVSender) -> None:
        """Have a thread run the sender's next job. It must have one and not be queued."""
        with self._lock:
            if self._busy[sender.receiver] < self._per_receiver:
                self._busy[sender.receiver] += 1
                self._ready.put(sender)
            else:
                self._waiting.setdefault(sender.receiver, deque()).append(sender)

    def post(self, sent: Sent) -> None:
        """A room's sending is over."""
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
            self._next_of(sender.receiver)

    def _next_of(self, receiver: str) -> None:
        """A thread is done with this receiver: its next sender takes the place."""
        with self._lock:
            waiting = self._waiting.get(receiver)
            if waiting:
                self._ready.put(waiting.popleft())
                return
            self._waiting.pop(receiver, None)
            self._busy[receiver] -= 1
            if not self._busy[receiver]:
                del self._busy[receiver]
