"""RouterPeers: routers of one directory tell each other what they have assigned to each worker.

Otherwise two routers would send one burst to one worker. A router sends its AssignedLoad of each worker in
absolute values: changes within `TELL_AFTER_S`, and everything once a second and to a new router. So no
message needs an answer, a repeated message changes nothing, and a lost one is made good within a second.
Messages are numbered, and every row keeps the number that it came with, so a late message does not undo a
newer one. A peer that is silent for `SILENT_S` counts as having assigned nothing; what it had assigned is in
the workers' own reports by then.

The sum of the peers' rows is `peers` of each WorkerLoadEstimate. Pure but for `send` and `wake`; belongs to
the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from router.placement.load_estimate import AssignedLoad, WorkerLoadEstimate
from wire.messages.routers import AssignedLoadRow, AssignedLoads

TELL_AFTER_S = 0.002  # a burst becomes a few messages, and peers know of it before their next choices
WHOLE_EVERY_S = 1.0
SILENT_S = 3.0
_NOTHING = AssignedLoad()


class LoadBook(Protocol):
    """The load estimates of live workers: of one fleet, or of all versions of all models."""

    def estimate(self, worker: str) -> WorkerLoadEstimate | None:
        """A live worker's estimate."""

    def estimates(self) -> list[WorkerLoadEstimate]:
        """Those of all live workers."""

    def set_peers(self, estimate: WorkerLoadEstimate, load: AssignedLoad) -> None:
        """The other routers together have assigned this load to a live worker."""


@dataclass(slots=True)
class _Peer:
    """What one other router has sent."""

    incarnation: int
    heard_at: float
    whole_number: int = -1  # the number of its last whole message
    rows: dict[str, tuple[int, AssignedLoadRow]] = field(default_factory=dict)  # by worker, with a number


class RouterPeers:
    """One router's view of its peers, and what they are told."""

    def __init__(
        self,
        book: LoadBook,
        address: str,
        incarnation: int,
        send: Callable[[str, AssignedLoads], None],
        wake: Callable[[], None],
    ) -> None:
        """`address` is this router's mailbox. `wake` schedules a `flush` after TELL_AFTER_S, and is called
        once per flush. `incarnation` is greater than that of any earlier router at the same address."""
        self._book = book
        self._address = address
        self._incarnation = incarnation
        self._send = send
        self._wake = wake
        self._others: set[str] = set()  # mailboxes of the directory's other routers
        self._peers: dict[str, _Peer] = {}  # those that have sent something
        self._unsent: set[str] = set()  # workers whose assigned load has changed
        self._number = 0
        self._whole_at = 0.0

    def __len__(self) -> int:
        """The number of routers whose assigned load is counted."""
        return len(self._peers)

    @property
    def others(self) -> frozenset[str]:
        """Mailboxes of the directory's other routers."""
        return frozenset(self._others)

    def meet(self, routers: Iterable[str]) -> None:
        """Take a new View's routers. Its workers may be some that peers have told of already."""
        others = set(routers) - {self._address}
        new, self._others = others - self._others, others
        if new:
            self._tell(new, self._all_rows(), whole=True)
        if self._peers:
            for estimate in self._book.estimates():
                self._sum(estimate.record.id)

    def take(self, sender: str, message: AssignedLoads, now: float) -> None:
        """Take a peer's message."""
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
            ended = [worker for worker, (number, _) in peer.rows.items() if number < message.number]
            for worker in ended:
                del peer.rows[worker]
            touched.update(ended)
        for worker in touched:
            self._sum(worker)

    def assigned(self, estimate: WorkerLoadEstimate) -> None:
        """This router's assigned load of a worker has changed. The peers are told soon."""
        if not self._others:
            return
        if not self._unsent:
            self._wake()
        self._unsent.add(estimate.record.id)

    def flush(self) -> None:
        """Send what has changed."""
        estimates = [self._book.estimate(worker) for worker in self._unsent]
        self._unsent.clear()
        self._tell(self._others, [_row(one) for one in estimates if one is not None], whole=False)

    def tick(self, now: float) -> None:
        """Send everything when it is due, and drop silent peers."""
        if now >= self._whole_at:
            self._whole_at = now + WHOLE_EVERY_S
            self._tell(self._others, self._all_rows(), whole=True)
        for address, peer in list(self._peers.items()):
            if now - peer.heard_at >= SILENT_S:
                del self._peers[address]
                for worker in peer.rows:
                    self._sum(worker)

    def _all_rows(self) -> list[AssignedLoadRow]:
        return [_row(one) for one in self._book.estimates() if one.own != _NOTHING]

    def _tell(self, to: Iterable[str], rows: list[AssignedLoadRow], whole: bool) -> None:
        self._number += 1
        message = AssignedLoads(self._incarnation, self._number, whole, rows)
        for address in to:
            self._send(address, message)

    def _sum(self, worker: str) -> None:
        """Add up what the peers have assigned to a worker."""
        estimate = self._book.estimate(worker)
        if estimate is None:
            return
        total = AssignedLoad()
        for peer in self._peers.values():
            _, row = peer.rows.get(worker, (0, None))
            if row is not None and row.incarnation == estimate.record.incarnation:
                _add(total, row)
        if total != estimate.peers:
            self._book.set_peers(estimate, total)


def _row(estimate: WorkerLoadEstimate) -> AssignedLoadRow:
    own, record = estimate.own, estimate.record
    return AssignedLoadRow(
        record.id, record.incarnation, own.requests, own.prefills, own.prefill_tokens, own.context_tokens,
        own.since_tokens, own.promised_tokens, own.promised_rooms,
    )  # fmt: skip


def _add(total: AssignedLoad, row: AssignedLoadRow) -> None:
    total.requests += row.requests
    total.prefills += row.prefills
    total.prefill_tokens += row.prefill_tokens
    total.context_tokens += row.context_tokens
    total.since_tokens += row.since_tokens
    total.promised_tokens += row.promised_tokens
    total.promised_rooms += row.promised_rooms
