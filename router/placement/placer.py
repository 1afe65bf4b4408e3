"""Placer: chooses workers for rooms, and keeps the load estimates and the index up to date with its choices.

A placement counts on its workers' estimates, and the prompt's pages are expected there, until the room is
over. The placer knows no sockets and no clock: `now` is passed in (seconds, any origin), so the router and
the simulator share it. Belongs to one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from router.index.global_index import GlobalIndex, Matches
from router.index.mixed import find_mixed
from router.index.page_table import Hashes
from router.placement.broken_pairs import BrokenPairs
from router.placement.expected_pages import Expectation, ExpectedPages
from router.placement.fleet import Fleet
from router.placement.fleet_table import Floats
from router.placement.load_estimate import WorkerLoadEstimate
from router.placement.peer_fetch import FetchPlan
from router.placement.placement import Placement
from router.placement.policy import Choice, PlacementRequest, Policy, RoleCandidates
from router.placement.transfer_rates import TransferPair, locality
from wire.messages.rooms import FetchSource, Timeline
from wire.records import WorkerRecord

_MEAN_OVER = 64  # requests over which the mean output is taken
_FIRST_OUTPUT = 512.0  # expected of a request while no answer is known: what D keeps free for its growth
_SESSIONS = 1 << 16  # sessions that are remembered


class Placer:
    """Chooses, places, and undoes what it placed."""

    def __init__(
        self,
        index: GlobalIndex,
        policy: Policy,
        expect_s: float,
        on_assigned: Callable[[WorkerLoadEstimate], None] = lambda _: None,
        broken_pairs: BrokenPairs | None = None,
    ) -> None:
        """Pages that are expected for longer than `expect_s` are given up. `on_assigned`: see Fleet.
        `broken_pairs`: those of a router with several placers."""
        self.fleet = Fleet(index, on_assigned)
        self.policy = policy
        self.broken_pairs = broken_pairs or BrokenPairs()
        self._shares_pages = False
        self.page_tokens = 0  # page size of the model's workers; 0: no worker has been seen yet
        self.mean_output = 0.0  # tokens of recent answers; 0: none yet
        self._mailboxes: dict[str, WorkerRecord] = {}
        self._index = index
        self._expected = ExpectedPages(index, expect_s)
        # The last (P, D) of each session. By a hash: clients choose the names, and with them their length.
        self._sessions: OrderedDict[int, tuple[str | None, str]] = OrderedDict()

    def update(self, records: list[WorkerRecord], now: float) -> None:
        """Take a new View of the workers."""
        for worker in self.fleet.update(records, now):
            self.policy.forget(worker)
        if records:
            self.page_tokens = records[0].groups[0].page_size
            self._shares_pages = any(record.shares_pages for record in records)
            self._mailboxes = {record.mailbox: record for record in records}
            self.policy.transfers.fleet(records)

    def suspect(self, workers: frozenset[str]) -> None:
        """These, and no others, are suspected of being gone: rooms wait rather than get one of them."""
        self.fleet.suspect(workers)

    def choose(
        self, request: PlacementRequest, now: float, avoid: frozenset[str] = frozenset()
    ) -> Choice | None:
        """Ask the policy. Returns None when no decode worker is there. Changes no load.

        A pair that does not get through is never chosen: its prefill worker is avoided then.
        """
        prefill, decode = self.fleet.candidates(now, avoid)
        if len(decode) == 0:
            return None
        if request.alone:
            prefill = prefill.without(frozenset(prefill.names))
        matches = self._find(request)
        p, d = self._sessions.get(_session(request), (None, None)) if request.session else (None, None)
        on_decode = RoleCandidates(decode, matches, self.page_tokens, decode.row(d))
        while True:
            on_prefill = RoleCandidates(prefill, matches, self.page_tokens, prefill.row(p))
            choice = self.policy.choose(request, on_prefill, on_decode)
            chosen = choice.prefill_worker
            if chosen is None or not self.broken_pairs.broken(
                chosen.record.id, choice.decode_worker.record.id, now
            ):
                return choice
            prefill = prefill.without(frozenset((chosen.record.id,)))

    def _find(self, request: PlacementRequest) -> Matches:
        """What the workers hold of a prompt that its tenant may use."""
        if request.public_hashes is None or not self._shares_pages:
            return self._index.find(request.hashes)
        return find_mixed(self._index, request.public_hashes, request.hashes)

    def choose_decode(self, request: PlacementRequest, now: float, avoid: frozenset[str]) -> Choice | None:
        """The least busy decode worker that can take the request with its KV at once. Returns None when none
        can, besides those to avoid."""
        prefill, decode = self.fleet.candidates(now)
        context = request.prompt_tokens + int(request.output_tokens)
        rows = [
            row
            for row, one in enumerate(decode.estimates)
            if one.record.id not in avoid and one.can_start(context)
        ]
        if not rows:
            return None
        matches = self._find(request)
        return Choice(
            request,
            RoleCandidates(prefill, matches, self.page_tokens),
            RoleCandidates(decode, matches, self.page_tokens),
            None,
            min(rows, key=lambda row: float(decode.requests[row])),
        )

    def costs(self, choice: Choice) -> dict[str, Floats]:
        """The costs that led to a choice, by row. Valid until the fleet changes."""
        return self.policy.costs(choice)

    def place(self, choice: Choice, now: float) -> Placement:
        """Count a choice on its workers' estimates, and expect the prompt's pages there."""
        request, p, d = choice.request, choice.prefill_worker, choice.decode_worker
        hit = min(choice.hit_tokens, request.prompt_tokens - 1)  # the last token is always computed ...
        hit -= hit % max(1, self.page_tokens)  # ... and with it its page
        left = request.prompt_tokens - hit
        context = request.prompt_tokens + int(request.output_tokens)
        fits, prefill_load = d.fits(context), d if p is None else p
        prefill_ticket, decode_ticket = prefill_load.prefill(left, now), d.decode(context, now)
        self.fleet.own_changed(d)
        if p is not None:
            self.fleet.own_changed(p)
        expected = []
        if choice.prefill_row is not None:
            expected.append(self._expect(request.hashes, choice.prefill, choice.prefill_row, now))
        expected.append(self._expect(request.hashes, choice.decode, choice.decode_row, now))
        self.policy.placed(choice)
        if request.session:
            self._remember(choice)
        return Placement(
            d.record, None if p is None else p.record, not fits, hit, left, context, d, prefill_load,
            prefill_ticket, decode_ticket, expected, self._source(choice.fetch),
        )  # fmt: skip

    def take_over(self, request: PlacementRequest, worker: WorkerRecord, now: float) -> Placement:
        """Count a request that a decode worker runs already."""
        d = self.fleet.estimate(worker.id) or WorkerLoadEstimate(worker, now)  # it may have left meanwhile
        context = request.prompt_tokens + int(request.output_tokens)
        tickets = d.prefill(0, now), d.decode(context, now)
        placement = Placement(worker, None, False, 0, 0, context, d, d, *tickets, [])
        self.prefilled(placement, now)
        return placement

    def prefilled(self, placement: Placement, now: float) -> None:
        """The first token came. Repeated calls change nothing."""
        if placement.prefilled:
            return
        placement.prefilled = True
        placement.prefill_load.prefilled(placement.prefill_ticket)
        self.fleet.own_changed(placement.prefill_load)
        if placement.source is not None and self.policy.peers is not None:
            self.policy.peers.ended(placement.source.worker)
        if placement.prefill is not None:
            self._expected.arrived(placement.expected[:1], now)

    def close(self, placement: Placement, now: float) -> None:
        """The epoch is over. Call it once."""
        self.prefilled(placement, now)
        self._expected.arrived(placement.expected, now)
        placement.decode_load.decoded(placement.decode_ticket)
        self.fleet.own_changed(placement.decode_load)

    def worker_at(self, mailbox: str) -> WorkerRecord | None:
        """The version's live worker at an address."""
        return self._mailboxes.get(mailbox)

    def transferred(self, to: str, told: Timeline) -> TransferPair | None:
        """The worker at a mailbox says how it received a room's KV. Returns both, or None if one of
        them has left."""
        prefill, decode = self._mailboxes.get(told.kv_from), self._mailboxes.get(to)
        if prefill is None or decode is None:
            return None
        self.policy.transfers.observe(prefill, decode, told.kv_backend, told.kv_bytes, told.kv_seconds)
        return TransferPair(prefill.id, decode.id, locality(prefill, decode))

    def answered(self, output_tokens: int) -> None:
        """A room ended by itself with this many output tokens. They count in the mean output."""
        share = 1 / _MEAN_OVER if self.mean_output else 1.0
        self.mean_output += share * (output_tokens - self.mean_output)

    def output_tokens(self, max_new_tokens: int) -> float:
        """The output to expect of a room that may have at most `max_new_tokens`.

        A client that names no maximum may have the rest of the context. While no answer is known, to expect
        that much would fill decode with one request.
        """
        return min(float(max_new_tokens), self.mean_output or _FIRST_OUTPUT)

    def tick(self, now: float) -> None:
        """Give up pages that were expected and have come or will not. Let old transfers count less."""
        self._expected.tick(now)
        self.policy.transfers.tick(now)

    def _source(self, fetch: FetchPlan | None) -> FetchSource | None:
        """The holder as workers are told of it. It has one more to serve."""
        if fetch is None or self.policy.peers is None:
            return None
        self.policy.peers.began(fetch)
        record = fetch.holder.record
        return FetchSource(record.id, record.mailbox, fetch.pages)

    def _remember(self, choice: Choice) -> None:
        session, p = _session(choice.request), choice.prefill_worker
        self._sessions[session] = (None if p is None else p.record.id, choice.decode_worker.record.id)
        self._sessions.move_to_end(session)
        if len(self._sessions) > _SESSIONS:
            self._sessions.popitem(last=False)

    def _expect(self, hashes: Hashes, candidates: RoleCandidates, row: int, now: float) -> Expectation:
        missing = hashes[candidates.held(row) // max(1, self.page_tokens) :]
        return self._expected.expect(candidates.workers.slots.item(row), missing, now)


def _session(request: PlacementRequest) -> int:
    return hash((request.tenant, request.session))
