"""Placer: one decision after the other. Index, fleet and policy composed, with what each decision costs.

A placement is booked on its workers, and the prompt's pages are expected there, until the room is over. It
knows no sockets and no clock: `now` is passed in (seconds, any origin), so the router and the simulator share
it. Belongs to one thread.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from router.index.global_index import GlobalIndex
from router.index.page_table import Hashes
from router.placement.fleet import Account, Fleet, Floats, Rows
from router.placement.policy import Ask, Picked, Policy, RoleCandidates
from wire.records import WorkerRecord

_EVENT_S = 1.0  # how long after a page is there its event may take
_MEAN_OVER = 64  # requests whose output length counts
_SESSIONS = 1 << 16  # that are remembered


class Choice(NamedTuple):
    """Whom the policy chose, and everything that it weighed."""

    ask: Ask
    picked: Picked
    prefill_side: RoleCandidates
    decode_side: RoleCandidates
    decode: WorkerRecord
    prefill: WorkerRecord | None

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that the worker which prefills holds."""
        if self.picked.prefill is not None:
            return self.prefill_side.held(self.picked.prefill)
        return self.decode_side.held(self.picked.decode)


class _Expected(msgspec.Struct, gc=False):  # many thousands live; none is part of a cycle
    until: float
    slot: int  # should it be another worker's by then, that one is expected to have a little less
    hashes: Hashes
    over: bool = False


@dataclass(slots=True)
class Booking:
    """One epoch of one room on its workers' accounts."""

    decode: str
    prefill: str | None
    decoder: Account
    prefiller: Account  # of P, or of D alone
    prefill_tokens: int  # to compute, by what the index said
    context_tokens: int  # prompt and expected output, on D
    hit_tokens: int  # prompt tokens that need not be computed, by what the index said
    fits: bool  # D has room for it at once, as far as one can tell
    ticket: int  # of the prefiller's account
    report_number: int  # of the decoder's account, when it was placed
    prefilled: bool = False
    expected: list[_Expected] = field(default_factory=list)  # P's first, where there is a P


class Placer:
    """Chooses, books, and takes off the books again."""

    def __init__(self, index: GlobalIndex, policy: Policy, expect_s: float) -> None:
        """Pages that were expected and have not come within `expect_s` are given up."""
        self.fleet = Fleet(index)
        self.policy = policy
        self.page_tokens = 0  # page size of the model's workers; 0: nobody has said yet
        self.mean_output = 0.0  # tokens of recent answers; 0: none yet
        self._index = index
        self._expect_s = expect_s
        self._expected: deque[_Expected] = deque()
        self._settling: deque[tuple[float, _Expected]] = deque()  # there, but their event may be on its way
        # Their last (P, D). By a hash: clients choose the names, and with them how long they are.
        self._sessions: OrderedDict[int, tuple[str | None, str]] = OrderedDict()

    def update(self, records: list[WorkerRecord], now: float) -> None:
        """A new View of the model's workers."""
        for worker in self.fleet.update(records, now):
            self.policy.forget(worker)
        if records:
            self.page_tokens = records[0].groups[0].page_size

    def choose(self, ask: Ask, now: float, avoid: frozenset[str] = frozenset()) -> Choice | None:
        """The policy's choice now, or None when no decode worker is there. Nothing is booked."""
        prefills, decodes = self.fleet.candidates(now, avoid)
        if len(decodes) == 0:
            return None
        matches = self._index.find(ask.hashes)
        p, d = self._sessions.get(_session(ask), (None, None)) if ask.session else (None, None)
        prefill = RoleCandidates(prefills, matches, self.page_tokens, _row(prefills, p))
        decode = RoleCandidates(decodes, matches, self.page_tokens, _row(decodes, d))
        picked = self.policy.pick(ask, prefill, decode)
        first = self._account(prefill, picked.prefill).record if picked.prefill is not None else None
        return Choice(ask, picked, prefill, decode, self._account(decode, picked.decode).record, first)

    def costs(self, choice: Choice) -> dict[str, Floats]:
        """What the policy weighed, by row; before anything else happens to the fleet."""
        return self.policy.costs(choice.ask, choice.prefill_side, choice.decode_side)

    def book(self, ask: Ask, choice: Choice, now: float) -> Booking:
        """The choice is taken."""
        picked = choice.picked
        decoder = prefiller = self._account(choice.decode_side, picked.decode)
        p = None
        if picked.prefill is not None:
            prefiller = self._account(choice.prefill_side, picked.prefill)
            p = prefiller.record.id
        hit = min(choice.hit_tokens, ask.prompt_tokens - 1)  # the last token is always computed ...
        hit -= hit % max(1, self.page_tokens)  # ... and with it its page
        left = ask.prompt_tokens - hit
        context = ask.prompt_tokens + int(ask.output_tokens)
        booking = Booking(
            decoder.record.id, p, decoder, prefiller, left, context, hit, decoder.fits(context),
            prefiller.prefill(left, now), decoder.decode(context),
        )  # fmt: skip
        self.fleet.given(decoder)
        if p is not None:
            self.fleet.given(prefiller)
        if picked.prefill is not None:
            booking.expected.append(self._expect(ask.hashes, choice.prefill_side, picked.prefill, now))
        booking.expected.append(self._expect(ask.hashes, choice.decode_side, picked.decode, now))
        self.policy.placed(ask, picked, choice.prefill_side, choice.decode_side)
        if ask.session:
            self._remember(_session(ask), booking)
        return booking

    def prefilled(self, booking: Booking, now: float) -> None:
        """The first token came. Repeats change nothing."""
        if booking.prefilled:
            return
        booking.prefilled = True
        booking.prefiller.prefilled(booking.ticket)
        self.fleet.given(booking.prefiller)
        if booking.prefill is not None:
            self._settle(booking.expected[:1], now)

    def close(self, booking: Booking, now: float) -> None:
        """The epoch is over. Once."""
        self.prefilled(booking, now)
        self._settle(booking.expected, now)
        booking.decoder.decoded(booking.context_tokens, booking.report_number)
        self.fleet.given(booking.decoder)

    def answered(self, output_tokens: int) -> None:
        """A room ended by itself with so much output: what to expect of the next."""
        share = 1 / _MEAN_OVER if self.mean_output else 1.0
        self.mean_output += share * (output_tokens - self.mean_output)

    def output_tokens(self, max_new_tokens: int) -> float:
        """What to expect of a room that may have so much output."""
        return min(float(max_new_tokens), self.mean_output or float(max_new_tokens))

    def tick(self, now: float) -> None:
        """Give up what was expected and has come or will not."""
        while self._settling and self._settling[0][0] <= now:
            self._unexpect(self._settling.popleft()[1])
        while self._expected and self._expected[0].until <= now:
            self._unexpect(self._expected.popleft())

    def _account(self, side: RoleCandidates, row: int) -> Account:
        account = self.fleet.account(side.rows.names[row])
        assert account is not None, "rows are of live workers"
        return account

    def _remember(self, session: int, booking: Booking) -> None:
        self._sessions[session] = (booking.prefill, booking.decode)
        self._sessions.move_to_end(session)
        if len(self._sessions) > _SESSIONS:
            self._sessions.popitem(last=False)

    def _expect(self, hashes: Hashes, side: RoleCandidates, row: int, now: float) -> _Expected:
        """The prompt's pages will be there."""
        missing = hashes[side.held(row) // max(1, self.page_tokens) :]
        expected = _Expected(now + self._expect_s, side.rows.slots.item(row), missing)
        if len(missing):
            self._index.expect(expected.slot, missing)
            self._expected.append(expected)
        return expected

    def _settle(self, expected: list[_Expected], now: float) -> None:
        for one in expected:
            if len(one.hashes) and not one.over:
                self._settling.append((now + _EVENT_S, one))

    def _unexpect(self, expected: _Expected) -> None:
        if not expected.over:
            expected.over = True
            self._index.unexpect(expected.slot, expected.hashes)


def _session(ask: Ask) -> int:
    return hash((ask.tenant, ask.session))


def _row(rows: Rows, worker: str | None) -> int | None:
    return rows.names.index(worker) if worker is not None and worker in rows.names else None
