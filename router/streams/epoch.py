"""RoomEpoch: one epoch of a room, from the messages that start it on its workers to the last of its tokens.

Pure but for `RoomMail`: time is passed in, so tests need no clock.
"""

from __future__ import annotations

import math
from typing import Protocol

from router.options import RoomOptions
from router.placement.placement import Placement
from router.streams.room_report import WorkerReport
from wire.messages.any_message import AnyMessage
from wire.messages.base import kind_of
from wire.messages.rooms import Abort, Decode, Prefill, Resend, RoomStatus
from wire.records import WorkerRecord
from wire.request import GenerateRequest
from wire.retransmitter import RetransmitKey

_LONGEST_SILENCE_S = 8.0  # between two Resends
_TURNS_S = 2.0  # an engine loop whose last turn is older is in a long forward


class RoomMail(Protocol):
    """How a room speaks to its workers."""

    def send(self, to: str, message: AnyMessage) -> None:
        """Send a message once."""

    def say(self, key: RetransmitKey, message: AnyMessage) -> None:
        """Send a message until it is answered. Giving up is reported by `RoomStream.on_given_up`."""

    def answered(self, key: RetransmitKey) -> None:
        """Stop repeating a message."""


class RoomEpoch:
    """What the workers of an epoch were told, and how long they have been silent."""

    def __init__(
        self,
        request: GenerateRequest,
        placement: Placement,
        mail: RoomMail,
        options: RoomOptions,
        now: float,
    ) -> None:
        """Nothing is said yet: `begin` an epoch that is new, `take_over` one that runs."""
        self.number = request.epoch
        self.placement = placement
        self.base = len(request.forced)  # output tokens of earlier epochs
        self._room = request.room
        self._mail = mail
        self._options = options
        self._silence_s = options.silence_s
        self._resend_at = now + self._silence_s
        self._decode_spoke = False
        self._statuses: dict[str, tuple[RoomStatus, float]] = {}  # the last of each mailbox, and when it came
        self._told: dict[RetransmitKey, Decode | Prefill] = {}
        self._held: Prefill | None = None  # not sent to P yet
        self._held_until = math.inf

    def begin(self, request: GenerateRequest, now: float, source: WorkerRecord | None = None) -> None:
        """Tell D, and P unless that must wait for D's Reserved. With `source`, the decode worker on which an
        older epoch runs, D takes the room over from there, and there is no P."""
        decode, prefill = self.placement.decode, self.placement.prefill
        partner = prefill or source
        mailbox = None if partner is None else partner.mailbox
        fetch = self.placement.source
        alone = fetch if partner is None else None
        self._tell(decode, Decode(request, mailbox, move=source is not None, source=alone))
        if prefill is not None:
            self._held = Prefill(request, decode.mailbox, fetch)
            self._held_until = now + self._options.hold_prefill_s
            if not self.placement.hold_prefill:
                self.send_held()

    def take_over(self, now: float) -> None:
        """D runs the epoch for another router and now for this one: ask for all of its output."""
        self.ask_again(self.base, now)

    @property
    def check_at(self) -> float:
        """When `tick` has something to do."""
        return min(self._resend_at, self._held_until)

    def tick(self, have: int, now: float) -> None:
        """Do what is due. `have`: the room's output tokens so far."""
        if now >= self._held_until:
            self.send_held()  # harmless: a P without a target holds nothing that cannot be evicted
        if now >= self._resend_at:
            self.ask_again(have, now)

    def send_held(self) -> None:
        """Start P, unless it was started before."""
        held, prefill = self._held, self.placement.prefill
        if held is not None and prefill is not None:
            self._held = None
            self._held_until = math.inf
            self._tell(prefill, held)

    def heard(self, sender: str) -> bool:
        """A worker sent tokens, which are as good as a receipt. Whether they are D's first."""
        decode, prefill = self.placement.decode, self.placement.prefill
        if sender == decode.mailbox:
            if not self._decode_spoke:
                self._decode_spoke = True
                self._mail.answered(self._key(decode, "decode"))
                if prefill is not None:
                    self._mail.answered(self._key(prefill, "prefill"))
                return True
        elif prefill is not None and sender == prefill.mailbox:
            self._mail.answered(self._key(prefill, "prefill"))
        return False

    def on_status(self, sender: str, status: RoomStatus, now: float) -> str | None:
        """A worker has the room, which is as good as a receipt. Returns its id if the epoch needs it."""
        worker = self.needed(sender)
        if worker is None:
            return None
        self._mail.answered(self._key(worker, "decode" if worker is self.placement.decode else "prefill"))
        self._statuses[sender] = status, now
        return worker.id

    def progress(self, now: float) -> float:
        """New tokens came, and more follow. Returns when `tick` is due."""
        self._silence_s = self._options.silence_s
        self._resend_at = now + self._silence_s
        if self._statuses:
            self._statuses.clear()
        return self._resend_at

    def ask_again(self, have: int, now: float) -> None:
        """Ask for the tokens from position `have` on. Intervals double: a long prefill is silent, too."""
        decode, prefill = self.placement.decode, self.placement.prefill
        resend = Resend(self._room, self.number, have)
        self._mail.send(decode.mailbox, resend)
        if have == self.base and prefill is not None and self._held is None:
            self._mail.send(prefill.mailbox, resend)
        self._silence_s = min(_LONGEST_SILENCE_S, self._silence_s * 2)
        self._resend_at = now + self._silence_s

    def insist(self, key: RetransmitKey) -> bool:
        """A worker has not acknowledged its start message. If it is only slow, tell it again: True."""
        placement = self.placement
        of_decode = key.to == placement.decode.mailbox
        load = (placement.decode_load if of_decode else placement.prefill_load).record.load
        if key not in self._told or load.since_turn_s <= _TURNS_S:
            return False
        self._mail.say(key, self._told[key])
        return True

    def is_served_by(self, mailbox: str) -> bool:
        """Whether the worker at an address is the epoch's D or P."""
        prefill = self.placement.prefill
        return mailbox == self.placement.decode.mailbox or (
            prefill is not None and mailbox == prefill.mailbox
        )

    def needed(self, mailbox: str) -> WorkerRecord | None:
        """The worker at an address, if the epoch needs it still: D, or P until D has sent tokens."""
        decode, prefill = self.placement.decode, self.placement.prefill
        if decode.mailbox == mailbox:
            return decode
        if prefill is not None and prefill.mailbox == mailbox and not self._decode_spoke:
            return prefill
        return None

    def report(self, now: float) -> list[WorkerReport]:
        """The epoch's workers, with what each said last about the room."""
        reports = []
        for worker in (self.placement.prefill, self.placement.decode):
            if worker is not None:
                status, at = self._statuses.get(worker.mailbox, (None, now))
                reports.append(WorkerReport.of(worker, status, now - at))
        return reports

    def leave(self, abort: str | None) -> None:
        """Stop repeating what the workers were told. With `abort`, a reason, tell them that it is over.

        A worker that is lost never answers the abort; its repeats end by themselves.
        """
        self._held = None
        for worker, kind in ((self.placement.decode, "decode"), (self.placement.prefill, "prefill")):
            if worker is not None:
                self._mail.answered(self._key(worker, kind))
                if abort is not None:
                    self._mail.say(self._key(worker, "abort"), Abort(self._room, self.number, abort))

    def _tell(self, worker: WorkerRecord, message: Decode | Prefill) -> None:
        key = self._key(worker, kind_of(message))
        self._told[key] = message
        self._mail.say(key, message)

    def _key(self, worker: WorkerRecord, kind: str) -> RetransmitKey:
        return RetransmitKey(worker.mailbox, self._room, self.number, kind)
