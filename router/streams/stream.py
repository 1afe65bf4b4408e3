"""RoomStream: one room's conversation with its workers, whatever gets lost, doubled, late or dies.

    WAITING ----- a choice ----> PLACED ----- finish, abort, error ----> DONE
       ^                           |
       +------- restart: epoch + 1 + (rejected, worker lost, timed out)

The router owns the stream: it knows the prompt and every token it has forwarded. A restart sends both (the
tokens as `forced`), and workers sample from the next position on. Positions count from the room's first
output token, over all epochs, and `max_new_tokens` counts from there too; so nothing can be lost, doubled or
contradicted: a run that begins later than what we hold is a gap (Resend), one that begins earlier is cut.

Pure but for `RoomHost`: time is passed in, so tests need no clock.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Protocol

import msgspec

from common.errors import BatonError, InvalidRequest, Overloaded, Unavailable
from router.index.page_table import Hashes
from router.options import RouterOptions
from router.placement.placement import Placement
from wire.messages import (
    Abort,
    AnyMessage,
    Decode,
    FinishReason,
    GenerateRequest,
    Prefill,
    Rejected,
    RejectKind,
    Resend,
    SamplingParams,
    TokenLogprobs,
    TokenRun,
)
from wire.records import WorkerRecord
from wire.retransmitter import RetransmitKey

_LONGEST_SILENCE_S = 8.0  # between two Resends
_FIRST_PAUSE_S = 0.1  # before a restart that no better worker can take at once


class RoomPlan(msgspec.Struct, frozen=True):  # a frozen dataclass of so many fields is slow to make
    """What a room is for; the same in every epoch."""

    request_id: str
    room: int
    prompt: bytes
    prompt_tokens: int
    page_hashes: Hashes  # of the prompt's whole pages, for the index
    sampling: SamplingParams
    choice: int
    extra_key: str
    cache_salt: str
    tenant: str
    priority: int
    session: str = ""


class RoomSink(Protocol):
    """Where a room's output goes."""

    def on_tokens(
        self, tokens: list[int], logprobs: list[TokenLogprobs] | None, finish: FinishReason | None
    ) -> None:
        """New tokens, each exactly once and in order; `finish` comes with the last ones."""

    def on_error(self, error: BatonError) -> None:
        """The room has failed; nothing follows."""


class RoomHost(Protocol):
    """What a room needs of the router."""

    def place(self, room: RoomStream, avoid: set[str]) -> Placement | None:
        """Workers for the room's next epoch, or None while there are none. Books it."""

    def unplace(self, room: RoomStream) -> None:
        """The epoch is over: take it off the books."""

    def prefilled(self, room: RoomStream) -> None:
        """The epoch's first token came: P's part is off the books."""

    def send(self, to: str, message: AnyMessage) -> None:
        """Say it once."""

    def say(self, key: RetransmitKey, message: AnyMessage) -> None:
        """Say it until answered; a give-up comes back as `on_given_up`."""

    def answered(self, key: RetransmitKey) -> None:
        """Stop saying it."""

    def closed(self, room: RoomStream) -> None:
        """The room is done."""


class _Phase(Enum):
    WAITING = auto()
    PLACED = auto()
    DONE = auto()


class RoomStream:
    """One choice of one request."""

    def __init__(self, plan: RoomPlan, host: RoomHost, sink: RoomSink, options: RouterOptions) -> None:
        self.plan = plan
        self.epoch = 0
        self.tokens: list[int] = []  # all output so far
        self.placement: Placement | None = None
        self.cached_tokens = 0
        self.restarts = 0
        self._host = host
        self._sink = sink
        self._options = options
        self._phase = _Phase.WAITING
        self._base = 0  # len(tokens) when the epoch began
        self._decode_spoke = False
        self._held: Prefill | None = None
        self._held_until = 0.0
        self._avoid: set[str] = set()
        self._why_waiting: BatonError | None = None
        self._give_up_at = 0.0  # WAITING: for a worker; PLACED: for the next token
        self._resend_at = 0.0
        self._silence_s = options.silence_s
        self.check_at = 0.0  # tick() has nothing to do before

    @property
    def done(self) -> bool:
        """Nothing follows."""
        return self._phase is _Phase.DONE

    def start(self, now: float) -> None:
        """Place the room, or wait for a worker."""
        self._wait_for_worker(now, now)

    def stop(self, reason: str) -> None:
        """Nobody wants more (stop string, client gone): tell both workers. Repeats change nothing."""
        if self._phase is _Phase.DONE:
            return
        self._abort_epoch(reason, tell=True)
        self._close()

    def fail(self, error: BatonError) -> None:
        """End the room with an error."""
        if self._phase is _Phase.DONE:
            return
        self._abort_epoch(str(error), tell=True)
        self._close()
        self._sink.on_error(error)

    # -- what workers say ----------------------------------------------------------------------

    def on_run(self, sender: str, run: TokenRun, now: float) -> int:
        """Forward what is new in a run. Returns how many tokens we hold, for the acknowledgement."""
        have = len(self.tokens)
        if run.epoch != self.epoch or self._phase is not _Phase.PLACED:
            return have
        assert self.placement is not None
        if run.start > have:
            self._ask_again(now)
            return have
        skip = have - run.start
        new = run.tokens[skip:] if skip else run.tokens
        logprobs = run.logprobs[skip:] if run.logprobs is not None else None
        if not new and run.finish is None:
            self._heard(sender)
            return have
        first = have == self._base
        self._heard(sender)
        if self._base == 0:
            self.cached_tokens = min(max(self.cached_tokens, run.cached_tokens), self.plan.prompt_tokens)
        self.tokens.extend(new)
        have += len(new)
        if first:
            self._host.prefilled(self)
        if run.finish is not None:
            self._close()
        else:
            self._silence_s = self._options.silence_s
            self._resend_at = now + self._silence_s
            self._give_up_at = now + self._options.token_timeout_s
            self.check_at = self._resend_at
        self._sink.on_tokens(new, logprobs, run.finish)
        return have

    def on_reserved(self, epoch: int) -> None:
        """D has its pages: P may start."""
        if epoch == self.epoch and self._phase is _Phase.PLACED:
            self._send_held()

    def on_rejected(self, sender: str, message: Rejected, now: float) -> None:
        """A worker will send nothing (more) for this epoch."""
        if message.epoch != self.epoch or self._phase is not _Phase.PLACED:
            return
        worker = self._worker_at(sender)
        if worker is None or (self._decode_spoke and not self._is_decode(worker)):
            return  # not one of this epoch, or P, which D needs no longer
        if message.why is RejectKind.INVALID:
            self.fail(InvalidRequest(message.message))
        elif message.why is RejectKind.OVERLOADED:
            wait = message.retry_after_s or self._options.retry_after_s
            self._restart(worker.id, Overloaded(message.message, wait), now)
        else:
            self._restart(worker.id, Unavailable(f"worker {worker.id}: {message.message}"), now)

    def on_worker_lost(self, worker: WorkerRecord, now: float) -> None:
        """A worker's lease ended, or its process was replaced."""
        placement = self.placement
        if self._phase is not _Phase.PLACED or placement is None:
            return
        lost_decode = placement.decode.mailbox == worker.mailbox
        lost_prefill = placement.prefill is not None and placement.prefill.mailbox == worker.mailbox
        if lost_decode or (lost_prefill and not self._decode_spoke):
            self._restart(worker.id, Unavailable(f"worker {worker.id} was lost"), now)

    def on_given_up(self, key: RetransmitKey, now: float) -> None:
        """A worker has acknowledged nothing of what we repeated."""
        if key.epoch != self.epoch or self._phase is not _Phase.PLACED or key.kind == "abort":
            return
        worker = self._worker_at(key.to)
        if worker is not None and not self._decode_spoke:
            self._restart(worker.id, Unavailable(f"worker {worker.id} does not answer"), now)

    # -- time ----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Do what is due. Cheap to call too often."""
        if now < self.check_at or self._phase is _Phase.DONE:
            return
        if self._phase is _Phase.WAITING:
            self._place(now)
            return
        if self._held is not None and now >= self._held_until:
            self._send_held()  # harmless: a P without a target holds nothing that cannot be evicted
        if now >= self._give_up_at:
            assert self.placement is not None
            name = self.placement.decode.id
            self._restart(name, Unavailable(f"no token came from worker {name} in time"), now)
            return
        if now >= self._resend_at:
            self._ask_again(now)
        self.check_at = min(self._resend_at, self._give_up_at)
        if self._held is not None:
            self.check_at = min(self.check_at, self._held_until)

    # -- inside --------------------------------------------------------------------------------

    def _wait_for_worker(self, now: float, at: float) -> None:
        self._phase = _Phase.WAITING
        self._give_up_at = now + self._options.worker_wait_s
        self.check_at = at
        if at <= now:
            self._place(now)

    def _place(self, now: float) -> None:
        """Start an epoch, or look again soon."""
        placement = self._host.place(self, self._avoid)
        if placement is None:
            if now >= self._give_up_at:
                self.fail(self._why_waiting or Unavailable("no decode worker is there for this model"))
            else:
                self.check_at = now + _FIRST_PAUSE_S
            return
        self.placement = placement
        self._phase = _Phase.PLACED
        self._base = len(self.tokens)
        self._decode_spoke = False
        self._silence_s = self._options.silence_s
        self._resend_at = now + self._silence_s
        self._give_up_at = now + self._options.first_token_timeout_s
        self.check_at = self._resend_at
        request = self._request()
        decode, prefill = placement.decode, placement.prefill
        self._host.say(
            self._key(decode, "decode"), Decode(request, prefill.mailbox if prefill is not None else None)
        )
        if prefill is not None:
            self._held = Prefill(request, decode.mailbox)
            self._held_until = now + self._options.hold_prefill_s
            if placement.hold_prefill:
                self.check_at = min(self.check_at, self._held_until)
            else:
                self._send_held()

    def _request(self) -> GenerateRequest:
        plan = self.plan
        return GenerateRequest(
            request_id=plan.request_id, room=plan.room, epoch=self.epoch, prompt=plan.prompt,
            sampling=plan.sampling, choice=plan.choice, forced=tuple(self.tokens), extra_key=plan.extra_key,
            cache_salt=plan.cache_salt, tenant=plan.tenant, priority=plan.priority,
        )  # fmt: skip

    def _send_held(self) -> None:
        if self._held is not None and self.placement is not None and self.placement.prefill is not None:
            self._host.say(self._key(self.placement.prefill, "prefill"), self._held)
            self._held = None

    def _heard(self, sender: str) -> None:
        """Tokens are as good as a receipt."""
        assert self.placement is not None
        if sender == self.placement.decode.mailbox:
            if not self._decode_spoke:
                self._decode_spoke = True
                self._host.answered(self._key(self.placement.decode, "decode"))
                if self.placement.prefill is not None:
                    self._host.answered(self._key(self.placement.prefill, "prefill"))
        elif self.placement.prefill is not None and sender == self.placement.prefill.mailbox:
            self._host.answered(self._key(self.placement.prefill, "prefill"))

    def _ask_again(self, now: float) -> None:
        """Resend, at intervals that double: silence is normal during a long prefill."""
        assert self.placement is not None
        have = len(self.tokens)
        resend = Resend(self.plan.room, self.epoch, have)
        self._host.send(self.placement.decode.mailbox, resend)
        if have == self._base and self.placement.prefill is not None and self._held is None:
            self._host.send(self.placement.prefill.mailbox, resend)
        self._silence_s = min(_LONGEST_SILENCE_S, self._silence_s * 2)
        self._resend_at = now + self._silence_s

    def _restart(self, blamed: str, why: BatonError, now: float) -> None:
        """A new epoch, elsewhere if there is an elsewhere."""
        self._abort_epoch(str(why), tell=True)
        if self.restarts >= self._options.max_restarts:
            self._close()
            self._sink.on_error(why)
            return
        self.restarts += 1
        self.epoch += 1
        self._avoid.add(blamed)
        self._why_waiting = why
        pause = 0.0 if self.restarts == 1 else _FIRST_PAUSE_S * 2 ** (self.restarts - 2)
        self._wait_for_worker(now, now + pause)

    def _abort_epoch(self, reason: str, tell: bool) -> None:
        """Leave the epoch's workers. One that is lost never answers; the repeats end by themselves."""
        placement, self.placement, self._held = self.placement, None, None
        if placement is None:
            return
        self._host.unplace(self)
        for worker, kind in ((placement.decode, "decode"), (placement.prefill, "prefill")):
            if worker is not None:
                self._host.answered(self._key(worker, kind))
                if tell:
                    self._host.say(self._key(worker, "abort"), Abort(self.plan.room, self.epoch, reason))

    def _close(self) -> None:
        if self.placement is not None:
            self._abort_epoch("", tell=False)
        self._phase = _Phase.DONE
        self._host.closed(self)

    def _key(self, worker: WorkerRecord, kind: str) -> RetransmitKey:
        return RetransmitKey(worker.mailbox, self.plan.room, self.epoch, kind)

    def _worker_at(self, mailbox: str) -> WorkerRecord | None:
        placement = self.placement
        if placement is None:
            return None
        if placement.decode.mailbox == mailbox:
            return placement.decode
        if placement.prefill is not None and placement.prefill.mailbox == mailbox:
            return placement.prefill
        return None

    def _is_decode(self, worker: WorkerRecord) -> bool:
        return self.placement is not None and worker.mailbox == self.placement.decode.mailbox
