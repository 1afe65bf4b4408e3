"""Fetching: pages of prompts that another worker has, copied instead of computed.

    begin ──pages reserved, Fetch sent──> waiting ──Fetched──> in the tree ──┐
      │                                     │ refused, late, holder down,    ├─> the request is queued
      └──not worth it, or no room───────────┴─ aborted: pages in quarantine ─┘

The pages are reserved before the holder is asked, so that no worker waits for memory of another. A request
has one fetch. The time that computing would take is the deadline: after that the request is computed in other
pages, and the reserved ones wait for the transport's fence.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from common.errors import TransferError
from kvtransfer.receiver import KVReceiver
from scheduler.fetches import FetchHold
from scheduler.req import Req, ReqState
from scheduler.scheduler import Scheduler
from wire.codec import pack_tokens
from wire.holds import Hold
from wire.messages.rooms import FetchSource
from wire.messages.transfer import FETCH_EPOCH, Fetch, Fetched, FetchRefused, GroupTarget, KVDone
from wire.page_hash import page_digests
from wire.peer_monitors import PeerState
from wire.retransmitter import RetransmitKey
from worker.fetch_rates import FetchRates
from worker.holds import QuarantineOwner
from worker.outbox import OutputKey
from worker.quarantine import Quarantine
from worker.services import Services

_DOWN_S = 30.0  # a holder that went down is not asked for that long, unless it comes up
_FIRST_S = 1.0  # a fetch may take that long before anything was computed here


@dataclass(slots=True, eq=False)
class _Fetch:
    """One fetch on its way. `hold` has the reserved pages, `receiver` lets the holder write them."""

    transfer: int
    holder: str  # mailbox
    hold: FetchHold
    receiver: KVReceiver
    began: float
    deadline: float

    @property
    def req(self) -> Req:
        return self.hold.req

    @property
    def question(self) -> RetransmitKey:
        """Names the Fetch that is repeated."""
        return RetransmitKey(self.holder, self.transfer, FETCH_EPOCH, "fetch")


class Fetching:
    """All fetches of one worker. Engine loop's thread only."""

    def __init__(self, services: Services, scheduler: Scheduler) -> None:
        self._services = services
        self._scheduler = scheduler
        self._metrics = scheduler.metrics
        self._page_size = services.memory.page_size
        self._fetches: dict[int, _Fetch] = {}
        self._quarantine = Quarantine(services.memory)
        self._rates = FetchRates()
        self._down: dict[str, float] = {}  # mailboxes that went down, and until when they are not asked

    def __len__(self) -> int:
        return len(self._fetches)

    @property
    def busy(self) -> bool:
        """Whether pages are reserved, or still in quarantine."""
        return bool(self._fetches or self._quarantine)

    @property
    def holders(self) -> frozenset[str]:
        """The mailboxes of workers that are asked for pages."""
        return frozenset(fetch.holder for fetch in self._fetches.values())

    def add(self, req: Req, source: FetchSource | None, now: float) -> None:
        """Give the request to the scheduler: at once, or when what `source` has of its prompt is here."""
        fetch = None if source is None else self._begin(req, source, now)
        self._scheduler.add(req, fetch is not None)
        if fetch is not None and req.state is not ReqState.FETCHING:
            self._give_up(fetch, "aborted")  # it can never run

    # -- the beginning -----------------------------------------------------------------------------

    def _begin(self, req: Req, source: FetchSource, now: float) -> _Fetch | None:
        """Reserve pages and ask for them; None when that is not worth it, or not possible now."""
        fetches = self._scheduler.fetches
        tokens = fetches.usable(req, source.pages * self._page_size)
        missing = fetches.missing(req, tokens)
        compute_s = fetches.compute_s(missing)
        why = self._why_not(source.mailbox, missing, compute_s, now)
        hold = None if why else fetches.reserve(req, tokens)
        if hold is None:
            self._metrics.fetches[f"skipped_{why or 'full'}"] += 1
            return None
        bound_s = max(_FIRST_S if compute_s is None else compute_s, self._services.options.peer_fetch_min_s)
        return self._ask(source.mailbox, hold, now, now + bound_s)

    def _why_not(self, holder: str, missing: int, compute_s: float | None, now: float) -> str:
        """Why `missing` tokens, which take `compute_s`, are computed; "" when they should be fetched."""
        options = self._services.options
        if missing < options.peer_fetch_min_tokens:
            return "short"
        if now < self._down.get(holder, now) or holder == self._services.mailbox.address:
            return "down"
        asked = sum(fetch.holder == holder for fetch in self._fetches.values())
        if asked >= options.peer_fetches_per_source:
            return "busy"
        return "" if self._rates.pays(holder, missing, compute_s, now) else "slower"

    def _ask(self, holder: str, hold: FetchHold, now: float, deadline: float) -> _Fetch:
        """Let the holder write the reserved pages, and ask it to."""
        transfer, primary = secrets.randbits(62), self._services.memory.specs[0].name
        targets = {
            name: GroupTarget(hold.first_page if name == primary else 0, pages.tolist())
            for name, pages in hold.pages.items()
            if name in self._services.transfer.regions
        }
        pool = self._services.transfer.receiver
        receiver = KVReceiver(pool, transfer, FETCH_EPOCH, len(hold.key), targets)
        fetch = self._fetches[transfer] = _Fetch(transfer, holder, hold, receiver, now, deadline)
        message = self._message(fetch, targets)
        self._services.retransmitter.say(fetch.question, message, now, deadline - now)
        return fetch

    def _message(self, fetch: _Fetch, targets: dict[str, GroupTarget]) -> Fetch:
        transfer, namespace = self._services.transfer, fetch.req.namespace
        return Fetch(
            fetch.transfer,
            receiver=self._services.worker_id,
            host=transfer.host,
            fingerprint=transfer.fingerprint,
            layout=transfer.layout,
            endpoints=transfer.receiver.endpoints,
            seed=namespace.seed,
            extra_key=namespace.extra_key,
            cache_salt=namespace.cache_salt,
            tenant=fetch.req.tenant_key,
            tokens=pack_tokens(fetch.hold.key.tokens),
            have=fetch.hold.have,
            groups=targets,
            checksums=self._services.options.kv_checksums,
            marks=fetch.req.marks,
        )

    # -- the end -----------------------------------------------------------------------------------

    def on_answer(self, sender: str, message: Fetched | FetchRefused, now: float) -> None:
        """The holder has written, or will not. Of another sender, or of no fetch: nothing happens."""
        fetch = self._fetches.get(message.transfer)
        if fetch is None or fetch.holder != sender:
            return
        if isinstance(message, FetchRefused):
            self._give_up(fetch, f"refused_{message.cause}")
            return
        try:
            nbytes = self._check(fetch, message)
        except TransferError:
            self._give_up(fetch, "failed")
            return
        self._metrics.fetched_tokens += self._scheduler.fetches.commit(fetch.hold, message.pages)
        self._metrics.fetched_bytes += nbytes
        self._metrics.fetch_seconds.add(now - fetch.began)
        self._measured(fetch, message.pages * self._page_size, now)
        self._end(fetch, "done")

    def on_peer(self, mailbox: str, state: PeerState, now: float) -> None:
        """A holder that is down is not waited for."""
        if state is PeerState.UP:
            self._down.pop(mailbox, None)
            return
        self._down = {peer: until for peer, until in self._down.items() if now < until}
        self._down[mailbox] = now + _DOWN_S
        self._rates.forget(mailbox)
        for fetch in list(self._fetches.values()):
            if fetch.holder == mailbox:
                self._give_up(fetch, "failed")

    def holds(self, now: float) -> list[Hold]:
        """The reserved pages, which the holders may write."""
        return [
            Hold(
                self._services.worker_id,
                "pages for a fetch",
                fetch.holder,
                fetch.transfer,
                FETCH_EPOCH,
                now - fetch.began,
                fetch.deadline - now,
            )
            for fetch in self._fetches.values()
        ]

    def poll(self, now: float) -> None:
        """Give up what is late or not wanted any more; free what no write can reach any more."""
        for fetch in list(self._fetches.values()):
            if fetch.req.state is not ReqState.FETCHING:
                self._give_up(fetch, "aborted")
            elif now >= fetch.deadline:
                self._measured(fetch, len(fetch.hold.key), now)
                self._give_up(fetch, "late")
        self._quarantine.lift()

    def _measured(self, fetch: _Fetch, tokens: int, now: float) -> None:
        self._rates.fetched(fetch.holder, tokens - fetch.hold.have, now - fetch.began, now)

    def _check(self, fetch: _Fetch, message: Fetched) -> int:
        """Compare what has landed with what the holder says. Returns the bytes. Raises TransferError."""
        hold = fetch.hold
        if not hold.have < message.pages * self._page_size <= len(hold.key):
            raise TransferError(f"{message.pages} pages came of {len(hold.key) // self._page_size}")
        tokens = hold.key[: message.pages * self._page_size].tokens
        digest = page_digests(hold.key.namespace.seed, tokens.tobytes(), self._page_size)[-1]
        if digest != message.digest:
            raise TransferError("the pages that came have another digest")
        done = KVDone(
            fetch.transfer,
            FETCH_EPOCH,
            context_tokens=len(hold.key),
            first_token=0,
            kv_bytes=message.kv_bytes,
            checksums=message.checksums,
        )
        filled = self._scheduler.fetches.filled(hold, message.pages)
        return fetch.receiver.commit(done, self._services.options.kv_checksums, filled)

    def _give_up(self, fetch: _Fetch, outcome: str) -> None:
        """The request goes on without it. A write may be in progress: its pages wait for the fence."""
        pages = self._scheduler.fetches.give_up(fetch.hold)
        owner = QuarantineOwner(OutputKey(fetch.transfer, FETCH_EPOCH), fetch.holder)
        self._quarantine.hold(owner, pages, fetch.receiver.abort())
        self._end(fetch, outcome)

    def _end(self, fetch: _Fetch, outcome: str) -> None:
        self._metrics.fetches[outcome] += 1
        del self._fetches[fetch.transfer]
        self._services.retransmitter.answered(fetch.question)
        self._scheduler.fetches.go_on(fetch.req)
