"""RouterPeers: what routers of one directory tell each other, lest two send one burst to one worker.

A router says what it has given to each worker (`fleet.Given`), in absolute values: what changed within
`TELL_AFTER_S`, and all of it once a second and to a router that is new. So nothing has to be answered, a
message that comes twice changes nothing, and one that is lost is repaired within a second. Messages are
numbered, and every row remembers the number it came with: one that comes late changes nothing that is newer.
A peer that says nothing for `SILENT_S` has given nobody anything; what it really had is in the workers' own
reports by then.

Sums of the rows are each Account's `peers`. Pure but for `send` and `wake`; belongs to the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from router.placement.fleet import Account, Fleet, Given
from wire.messages import AccountRow, Accounts

TELL_AFTER_S = 0.002  # a burst is a few messages, and the others know of it before their next choices
WHOLE_EVERY_S = 1.0
SILENT_S = 3.0
_NOTHING = Given()


@dataclass(slots=True)
class _Peer:
    """What one other router has said."""

    incarnation: int
    heard_at: float
    whole_number: int = -1  # of the last message that said everything
    rows: dict[str, tuple[int, AccountRow]] = field(default_factory=dict)  # by worker, with their number


class RouterPeers:
    """One router's end of the talk."""

    def __init__(
        self,
        fleet: Fleet,
        address: str,
        incarnation: int,
        send: Callable[[str, Accounts], None],
        wake: Callable[[], None],
    ) -> None:
        """`address` is this router's mailbox. `wake` asks for a `flush` in TELL_AFTER_S; it is called once
        until then. `incarnation` is greater than that of any earlier router at the same address."""
        self._fleet = fleet
        self._address = address
        self._incarnation = incarnation
        self._send = send
        self._wake = wake
        self._others: set[str] = set()  # mailboxes of the directory's other routers
        self._peers: dict[str, _Peer] = {}  # those that have spoken
        self._unsaid: set[str] = set()  # workers
        self._number = 0
        self._whole_at = 0.0
        fleet.on_given = self._given

    def __len__(self) -> int:
        """Routers whose accounts are known."""
        return len(self._peers)

    def meet(self, routers: Iterable[str]) -> None:
        """A new View: these routers are there, and perhaps workers that peers have spoken of already."""
        others = set(routers) - {self._address}
        new, self._others = others - self._others, others
        if new:
            self._tell(new, self._all_rows(), whole=True)
        if self._peers:
            for account in self._fleet.accounts():
                self._sum(account.record.id)

    def take(self, sender: str, message: Accounts, now: float) -> None:
        """A peer has spoken."""
        peer = self._peers.get(sender)
        if peer is None or peer.incarnation < message.incarnation:
            touched = set(peer.rows) if peer is not None else set()
            peer = self._peers[sender] = _Peer(message.incarnation, now)
        elif peer.incarnation > message.incarnation:
            return
        else:
            touched = set()
        peer.heard_at = now
        if message.number <= peer.whole_number:
            return
        for row in message.rows:
            known = peer.rows.get(row.worker)
            if known is None or known[0] < message.number:
                peer.rows[row.worker] = (message.number, row)
                touched.add(row.worker)
        if message.whole:
            peer.whole_number = message.number
            over = [worker for worker, (number, _) in peer.rows.items() if number < message.number]
            for worker in over:
                del peer.rows[worker]
            touched.update(over)
        for worker in touched:
            self._sum(worker)

    def flush(self) -> None:
        """Say what has changed."""
        accounts = [self._fleet.account(worker) for worker in self._unsaid]
        self._unsaid.clear()
        self._tell(self._others, [_row(one) for one in accounts if one is not None], whole=False)

    def tick(self, now: float) -> None:
        """Say everything when it is due; drop who is silent."""
        if now >= self._whole_at:
            self._whole_at = now + WHOLE_EVERY_S
            self._tell(self._others, self._all_rows(), whole=True)
        for address, peer in list(self._peers.items()):
            if now - peer.heard_at >= SILENT_S:
                del self._peers[address]
                for worker in peer.rows:
                    self._sum(worker)

    def _given(self, account: Account) -> None:
        if not self._others:
            return
        if not self._unsaid:
            self._wake()
        self._unsaid.add(account.record.id)

    def _all_rows(self) -> list[AccountRow]:
        return [_row(one) for one in self._fleet.accounts() if one.own != _NOTHING]

    def _tell(self, to: Iterable[str], rows: list[AccountRow], whole: bool) -> None:
        self._number += 1
        message = Accounts(self._incarnation, self._number, whole, rows)
        for address in to:
            self._send(address, message)

    def _sum(self, worker: str) -> None:
        """What the peers together have given a worker."""
        account = self._fleet.account(worker)
        if account is None:
            return
        total = Given()
        for peer in self._peers.values():
            _, row = peer.rows.get(worker, (0, None))
            if row is not None and row.incarnation == account.record.incarnation:
                _add(total, row)
        if total != account.peers:
            account.peers = total
            self._fleet.changed(account)


def _row(account: Account) -> AccountRow:
    own, record = account.own, account.record
    return AccountRow(
        record.id, record.incarnation, own.requests, own.prefills, own.prefill_tokens, own.context_tokens,
        own.since_tokens, own.promised_tokens, own.promised_rooms,
    )  # fmt: skip


def _add(total: Given, row: AccountRow) -> None:
    total.requests += row.requests
    total.prefills += row.prefills
    total.prefill_tokens += row.prefill_tokens
    total.context_tokens += row.context_tokens
    total.since_tokens += row.since_tokens
    total.promised_tokens += row.promised_tokens
    total.promised_rooms += row.promised_rooms
