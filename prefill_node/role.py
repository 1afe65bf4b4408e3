"""PrefillRole: compute the prompt, say token 0, ship the pages.

A room's life here, with what it holds:

    scheduler ──prefilled──> hand_off ──every page has landed──> over; KVDone is said until confirmed
    (row, locked   │  ▲      (the same)
     pages)        │  │ KVTarget: match again, recompute what was evicted
                   ▼  │
                 parked (nothing unevictable)

A room without a target must hold nothing unevictable after its forward, else prefill full of rooms without
targets and decode full of reservations without prefill wait for each other forever (docs/decisions/0016).
"""

from __future__ import annotations

import queue
import time

from common.errors import TransferError
from common.host import host_identity
from kvtransfer.pages import PageIds, as_pages
from kvtransfer.region import pool_regions
from kvtransfer.select import open_sender
from kvtransfer.sender import KVSender, SenderPool, Sent
from kvtransfer.transport import Bounds
from prefill_node.peers import MappedPeers
from prefill_node.room import PrefillHold, PrefillRoom
from scheduler.config import Phase
from scheduler.node_policy import AfterPrefill
from scheduler.req import Req
from wire.mailbox import Mail
from wire.messages import (
    KVDone,
    KVFailed,
    KVTarget,
    OutputDelta,
    Prefill,
    Receipt,
    RejectKind,
    Release,
    kind_of,
)
from wire.records import Role, layout_digest
from wire.retransmitter import RetransmitKey
from wire.stages import RequestStage
from worker.role import Services, WorkerRole


class PrefillRole(WorkerRole[PrefillRoom]):
    """The sending side of the hand-off."""

    name = Role.PREFILL
    accepts = Prefill
    phases = frozenset({Phase.PREFILL})
    shared_pool = False

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._page_size = self.options.page_size
        self._primary = services.memory.specs[0].name
        self._peers = MappedPeers()
        self._sent: queue.SimpleQueue[Sent] = queue.SimpleQueue()
        regions = pool_regions(services.memory)
        self._layout = layout_digest(services.memory.layouts())
        self._transport = open_sender(
            regions,
            host_identity(),
            self.options.kv_transfer_backend,
            self.options.interface,
            Bounds(write_s=self.options.transfer_timeout_s),
        )
        self._senders = SenderPool(
            self._transport, regions, self._on_sent, checksums=self.options.kv_checksums
        )

    def backends(self) -> tuple[str, ...]:
        return self._transport.backends

    def close(self) -> None:
        self._senders.close()
        self._transport.close()

    def _on_sent(self, sent: Sent) -> None:
        """On a transfer thread: post it to the loop."""
        self._sent.put(sent)
        self.mailbox.nudge()

    # -- the room starts ---------------------------------------------------------------------------

    def make_room(self, router: str, req: Req, message: Prefill) -> PrefillRoom:
        return PrefillRoom(req, router, message.decode, self._deadline())

    def begin(self, room: PrefillRoom) -> None:
        room.req.stamp(RequestStage.PREFILL_BOOTSTRAP)
        parked = self.rooms.unpark(room.room, room.epoch)
        if parked is not None:
            _, target = parked
            assert isinstance(target, KVTarget)
            if not self._aim(room, target):
                return
        self.scheduler.add(room.req)

    def handle(self, mail: Mail) -> None:
        if isinstance(mail.message, KVTarget):
            self._take_target(mail.sender, mail.message)

    def _take_target(self, decode: str, target: KVTarget) -> None:
        self.mailbox.send(decode, Receipt(target.room, target.epoch, kind_of(target)))
        room = self.rooms.get(target.room, target.epoch)
        if room is None:
            self._park_target(decode, target)
        elif room.sender is None and self._aim(room, target):
            self._resume(room)

    def _resume(self, room: PrefillRoom) -> None:
        """The target came after the forward: bring the KV back if it was given up, or ship it."""
        if room.hold is PrefillHold.PARKED:
            room.hold = PrefillHold.SCHEDULER
            self.scheduler.hand_off.readmit(room.req)
        elif room.hold is PrefillHold.HAND_OFF:
            self._send(room, _context_tokens(room.req), last=True)

    def _park_target(self, decode: str, target: KVTarget) -> None:
        """The router's Prefill may still be on its way; a buried room's will never be."""
        now = time.monotonic()
        if not self.rooms.park(target.room, target.epoch, decode, target, now):
            self._say(decode, KVFailed(target.room, target.epoch, "the room is over on prefill"))

    def _aim(self, room: PrefillRoom, target: KVTarget) -> bool:
        """Point the room's sender at decode's pages. False when it cannot write there: it has failed."""
        try:
            if target.layout != self._layout:
                raise TransferError(f"decode worker {target.decode} lays its pages out differently")
            endpoint = self._transport.choose(target)
        except TransferError as error:
            self._fail_both(room, str(error))
            return False
        room.sender = KVSender(
            self._senders, room.room, room.epoch, self._page_size, endpoint, target.groups, self._primary
        )
        self._peers.used(endpoint, time.monotonic())
        return True

    # -- NodePolicy --------------------------------------------------------------------------------

    def on_chunk(self, req: Req) -> None:
        room = self.rooms.get(req.room, req.epoch)
        assert room is not None
        self._ship_cached(room)

    def on_tokens(self, req: Req, start: int, delta: OutputDelta) -> None:
        room = self.rooms.get(req.room, req.epoch)
        assert room is not None
        assert len(delta.tokens) == 1, "a prefill worker samples one token per room"
        room.first_token = delta.tokens[0]
        room.first_logprobs = delta.logprobs[0] if delta.logprobs else None
        if delta.finish is not None:  # token 0 ended the request: decode gets Release instead of KV
            self._stop_sender(room)
            self._say(room.decode, Release(room.room, room.epoch))
        super().on_tokens(req, start, delta)

    def on_prefilled(self, req: Req) -> AfterPrefill:
        room = self.rooms.get(req.room, req.epoch)
        assert room is not None
        room.hold = PrefillHold.HAND_OFF
        if room.sender is not None:
            self._send(room, _context_tokens(req), last=True)
        return AfterPrefill.HAND_OFF

    # -- shipping ----------------------------------------------------------------------------------

    def _ship_cached(self, room: PrefillRoom) -> None:
        """Send the whole pages that are computed: they are locked in the tree, or private for good."""
        end = room.req.kv_committed_len // self._page_size * self._page_size
        if room.sender is not None and end > room.sender.start_send_idx:
            self._send(room, end, last=False)

    def _send(self, room: PrefillRoom, end: int, last: bool) -> None:
        """Hand tokens [start_send_idx, end) to the transfer threads."""
        assert room.sender is not None
        room.req.stamp(RequestStage.PREFILL_TRANSFER_KV_CACHE)
        row = self.memory.req_to_token_pool.req_to_token[room.req.req_pool_idx]
        pages = {self._primary: as_pages(row[: end : self._page_size] // self._page_size)}
        if last:
            pages.update(self._tails(room.req, end))
        room.sender.send(pages, end, last)

    def _tails(self, req: Req, end: int) -> dict[str, PageIds]:
        """What a query at position `end` needs of the groups that do not decide reuse, by logical page."""
        tails: dict[str, PageIds] = {}
        window, state = self.memory.swa, req.state_hold
        if window is not None:
            tails["window"] = as_pages(window.table[req.req_pool_idx, : window.pages_of(end)])
        if state is not None:
            assert state.live_len == end, f"{req} has the state after {state.live_len} tokens, not {end}"
            tails["state"] = as_pages([state.live])
        return tails

    def poll(self, now: float) -> None:  # noqa: ARG002  nothing here waits for a time
        for room in self.rooms.active():
            if room.hold is PrefillHold.SCHEDULER:
                self._ship_cached(room)
            elif room.hold is PrefillHold.HAND_OFF and room.sender is None:
                room.hold = PrefillHold.PARKED
                room.deadline = self._deadline()
                self.scheduler.hand_off.park(room.req)
        while not self._sent.empty():
            self._take_sent(self._sent.get())

    def sweep(self, now: float) -> None:
        for room in self.rooms.active():
            if room.hold is PrefillHold.PARKED and now >= room.deadline:
                self.fail(room, RejectKind.FAILED, "decode did not say where the KV should go in time")
        for endpoint in self._peers.take_idle(now):
            self._transport.drain(endpoint)

    def _take_sent(self, sent: Sent) -> None:
        room = self.rooms.get(sent.room, sent.epoch)
        if room is None:
            return  # aborted
        if sent.error is not None:
            self._fail_both(room, f"KV transfer failed: {sent.error}")
            return
        assert room.first_token is not None
        self.scheduler.hand_off.release(room.req)
        self.end(room)
        done = KVDone(
            room.room,
            room.epoch,
            context_tokens=_context_tokens(room.req),
            first_token=room.first_token,
            kv_bytes=sent.kv_bytes,
            logprobs=room.first_logprobs,
            cached_tokens=room.req.cached_tokens,
            checksums=sent.checksums,
        )
        self._say(room.decode, done)

    # -- the room ends early -----------------------------------------------------------------------

    def abandon(self, room: PrefillRoom) -> None:
        self._stop_sender(room)
        if room.hold is PrefillHold.HAND_OFF:
            self.scheduler.hand_off.release(room.req)
        elif room.hold is PrefillHold.SCHEDULER:
            self.scheduler.abort(room.room, room.epoch)

    def _fail_both(self, room: PrefillRoom, reason: str) -> None:
        """The hand-off cannot be: tell the router and decode."""
        self.fail(room, RejectKind.FAILED, reason)
        self._say(room.decode, KVFailed(room.room, room.epoch, reason))

    def _stop_sender(self, room: PrefillRoom) -> None:
        """Send nothing more of the room.

        A write in progress may go on reading pages that are freed meanwhile, which harms nobody: what it
        reads lands, if at all, in pages of a room that decode will never commit without a KVDone.
        """
        if room.sender is not None:
            room.sender.abort("the room was aborted")

    def _say(self, to: str, message: KVDone | KVFailed | Release) -> None:
        """Tell decode until it confirms."""
        key = RetransmitKey(to, message.room, message.epoch, kind_of(message))
        self.retransmitter.say(key, message, time.monotonic(), self.options.hand_off_timeout_s)

    def _deadline(self) -> float:
        return time.monotonic() + self.options.hand_off_timeout_s


def _context_tokens(req: Req) -> int:
    """Tokens whose KV decode needs: the prompt and, of a restarted room, what was forwarded before."""
    return req.prompt_len + len(req.request.forced)
