"""RoomStream: one room's output, exactly once and in order, whatever happens to its workers and their mail.

    waiting ---- workers chosen ---> an epoch ---- finish, abort, error ----> done
       ^                               |
       +------- restart: epoch + 1 + (rejected, worker lost or suspected)

No timer ends an epoch. A silent worker is asked, and answers with tokens, with the room's place in its queue,
or that it does not know the room; one that does not live any more is reported from outside.

The router knows the prompt and every token it has forwarded. A restart sends both (the tokens as `forced`),
and workers sample from the next position on. Positions count from the room's first output token, over all
epochs, and `max_new_tokens` counts from there too. So nothing can be lost, doubled or contradicted: a run
that begins later than what the router holds is a gap (Resend), one that begins earlier is cut.

Pure but for `RoomHost` and `RoomMail`: time is passed in, so tests need no clock.
"""

from __future__ import annotations

import logging
from typing import Protocol

from msgspec.structs import replace

from common.errors import BatonError, Interrupted, RequestFailed, Unavailable
from router.options import RouterOptions
from router.placement.broken_pairs import BrokenPairs
from router.placement.placement import Placement
from router.placement.policy import Choice, PlacementRequest
from router.streams.epoch import RoomEpoch, RoomMail
from router.streams.restarts import AvoidedWorkers, RestartBudget, RestartCause, rejection_error
from router.streams.room_report import RoomReport
from wire.messages.rooms import Rejected, RejectKind, RoomStatus
from wire.records import WorkerRecord
from wire.request import GenerateRequest, OutputDelta, TokenRun
from wire.retransmitter import RetransmitKey

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 2.0  # for a worker, of which the room is told (on_workers_changed)


class RoomSink(Protocol):
    """Where a room's output goes."""

    @property
    def accepted(self) -> bool:
        """Whether a room of the request had its turn. Then none of its rooms is refused."""

    def on_admitted(self) -> None:
        """The room's turn has come: it gets workers, now or as soon as there are any."""

    def on_tokens(self, delta: OutputDelta, cached_tokens: int) -> bool:
        """Take new tokens, each exactly once and in order. `delta.finish` is set with the last ones.

        `cached_tokens` is how many tokens of the prompt were not computed. Returns True when no more tokens
        are wanted: the room stops.
        """

    def on_error(self, error: BatonError) -> None:
        """The room has failed; nothing follows."""


class RoomHost(Protocol):
    """Gives rooms their workers. Rooms tell `broken_pairs` which of them get through to each other."""

    broken_pairs: BrokenPairs

    def place(self, room: RoomStream, avoid: frozenset[str], choice: Choice | None) -> Placement | None:
        """Workers for the room's epoch, by `choice` if that was made just now. None while there are none."""

    def unplace(self, room: RoomStream, placement: Placement) -> None:
        """The room's epoch is over."""

    def prefilled(self, room: RoomStream, placement: Placement) -> None:
        """The epoch's first token came, so its prefill is over."""

    def restarted(self, room: RoomStream, cause: RestartCause) -> None:
        """A new epoch begins, now or as soon as there are workers."""

    def closed(self, room: RoomStream) -> None:
        """The room is done."""


class RoomStream:
    """One choice of one request."""

    def __init__(
        self,
        request: GenerateRequest,
        placement_request: PlacementRequest,
        host: RoomHost,
        mail: RoomMail,
        sink: RoomSink,
        options: RouterOptions,
    ) -> None:
        """Both requests are those of epoch 0."""
        self._newest_epoch = request.epoch
        self.request = request  # of the epoch that runs, or that waits for workers
        self.number = request.room
        self.placement_request = placement_request
        self.tokens: list[int] = []  # all output so far
        self.cached_tokens = 0
        self.done = False  # nothing follows
        self._host = host
        self._mail = mail
        self._sink = sink
        self._options = options
        self.epoch: RoomEpoch | None = None  # that runs. None: the room waits for workers, or is done
        self._avoided = AvoidedWorkers()
        self._budget = RestartBudget(options.max_restarts)
        self._failed_alone = False  # a worker said so in an earlier epoch
        self._why_waiting: BatonError | None = None
        self._wait_until = 0.0
        self._paused_until = 0.0  # between a restart and its epoch
        self._check_at = 0.0  # tick() has nothing to do before

    @property
    def accepted(self) -> bool:
        """Whether the room's request may not be refused any more, so that it waits for its turn."""
        return self._sink.accepted

    def start(self, now: float, choice: Choice | None = None) -> None:
        """Place the room, by `choice` if that was made already, or wait for a worker."""
        self._sink.on_admitted()
        self._wait_until = now + self._options.worker_wait_s
        self._place(now, choice)

    def take_over(self, placement: Placement, epoch: int, newest: int, now: float) -> None:
        """Go on with a room of another router, which D runs in that epoch. New ones come after `newest`."""
        self._sink.on_admitted()
        self._newest_epoch = newest
        self.request = replace(self.request, epoch=epoch)
        self.epoch = RoomEpoch(self.request, placement, self._mail, self._options, now)
        self.epoch.take_over(now)
        self._check_at = self.epoch.check_at

    def stop(self, abort: str | None) -> None:
        """No more output is wanted here. Repeats change nothing.

        With `abort`, a reason (a stop string, say), tell the workers that the room is over. Without, it goes
        on there until another router claims it.
        """
        if not self.done:
            self._leave_epoch(abort)
            self.done = True
            self._host.closed(self)

    def fail(self, error: BatonError) -> None:
        """End the room with an error."""
        if not self.done:
            self.stop(str(error))
            self._sink.on_error(error)

    # -- what workers say ----------------------------------------------------------------------

    def on_run(self, sender: str, run: TokenRun, now: float) -> int:
        """Forward what is new in a run. Returns the position below which its sender may forget all tokens."""
        epoch = self.epoch
        if epoch is None or run.epoch != epoch.number:
            return run.start + len(run.tokens)
        have = len(self.tokens)
        if run.start > have:
            epoch.ask_again(have, now)
            return have
        if epoch.heard(sender):
            prefill = epoch.placement.prefill
            if prefill is not None:  # so D has the KV that P computed
                self._host.broken_pairs.works(prefill.id, epoch.placement.decode.id)
        skip = have - run.start
        new = run.tokens[skip:] if skip else run.tokens
        if not new and run.finish is None:
            return have
        logprobs = run.logprobs[skip:] if run.logprobs is not None else None
        if epoch.base == 0:
            self.cached_tokens = min(
                max(self.cached_tokens, run.cached_tokens), self.placement_request.prompt_tokens
            )
        self.tokens.extend(new)
        if have == epoch.base:
            self._budget.progress()
            self._host.prefilled(self, epoch.placement)
        if run.finish is not None:
            self.stop(None)
        else:
            self._check_at = epoch.progress(now)
        scores, pooled = (run.prompt_logprobs, run.pooled) if have == 0 else (None, None)
        delta = OutputDelta(new, logprobs, run.finish, prompt_logprobs=scores, pooled=pooled)
        _tell(self, self._sink, delta)
        return have + len(new)

    def on_reserved(self, epoch: int) -> None:
        """D has its pages: P may start."""
        if self.epoch is not None and self.epoch.number == epoch:
            self.epoch.send_held()

    def on_status(self, sender: str, status: RoomStatus, now: float) -> str | None:
        """A worker has the room and no tokens yet. Returns the worker's id, or None for a stale message."""
        epoch = self.epoch
        if epoch is None or epoch.number != status.epoch:
            return None
        return epoch.on_status(sender, status, now)

    def on_rejected(self, sender: str, message: Rejected, now: float) -> None:
        """A worker will send nothing (more) for an epoch."""
        worker = _needed(self.epoch, sender, message.epoch)
        if worker is None or self.epoch is None:
            return
        if message.why is RejectKind.CLAIMED:
            self.stop(None)
            self._sink.on_error(Interrupted(message.message))
            return
        error = rejection_error(worker.id, message, self._options.retry_after_s)
        alone = message.why is RejectKind.FAILED_ALONE
        # Alone once more, because one worker's memory or device may be at fault. The same again elsewhere
        # comes from the request or the model, and every further try would end alike.
        if message.why is RejectKind.INVALID or (alone and self._failed_alone):
            self.fail(error)
            return
        self._failed_alone |= alone
        cause, prefill = RestartCause(message.why), self.epoch.placement.prefill
        if message.blamed and prefill is not None:
            # P and D do not get through to each other, but both may to others: only the pair is avoided.
            cause = RestartCause.LINK
            decode = self.epoch.placement.decode
            self._avoided.add(prefill.id, now, because_of=decode.id)
            self._host.broken_pairs.add(prefill.id, decode.id, now)
        else:
            self._avoided.add(worker.id, now)
        self._restart(cause, error, now)

    def on_worker_gone(self, gone: WorkerRecord, why: str, now: float) -> None:
        """A worker is lost, or suspected of it. `why` completes the sentence "worker x ..."."""
        self._avoided.gone(gone.id)
        worker = _needed(self.epoch, gone.mailbox, self.request.epoch)
        if worker is not None:
            self._restart(RestartCause.GONE, Unavailable(f"worker {worker.id} {why}"), now)

    def on_workers_changed(self, now: float) -> None:
        """There are other workers than before: one of them may be what the room waits for."""
        if self.epoch is None and not self.done and now >= self._paused_until:
            self._place(now)

    def on_given_up(self, key: RetransmitKey, now: float) -> None:
        """A worker has acknowledged none of the repeats of a message."""
        worker = _needed(self.epoch, key.to, key.epoch)
        if worker is None or self.epoch is None or key.kind == "abort":
            return
        if not self.epoch.insist(key):
            self._avoided.add(worker.id, now)
            self._restart(RestartCause.SILENT, Unavailable(f"worker {worker.id} does not answer"), now)

    # -- time ----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Do what is due. Cheap to call too often."""
        if now < self._check_at or self.done:
            return
        epoch = self.epoch
        if epoch is None:
            self._place(now)
        else:
            epoch.tick(len(self.tokens), now)
            self._check_at = epoch.check_at

    def report(self, now: float) -> RoomReport:
        """Where the room is, for people."""
        return RoomReport(
            room=self.number,
            request_id=self.request.request_id,
            epoch=self.request.epoch,
            tokens=len(self.tokens),
            why=str(self._why_waiting) if self.epoch is None and self._why_waiting else "",
            workers=[] if self.epoch is None else self.epoch.report(now),
        )

    # -- epochs --------------------------------------------------------------------------------

    def _place(self, now: float, choice: Choice | None = None) -> None:
        """Start an epoch, or look again later."""
        placement = self._host.place(self, self._avoided.names(now), choice)
        if placement is not None:
            self.epoch = RoomEpoch(self.request, placement, self._mail, self._options, now)
            self.epoch.begin(self.request, now)
            self._check_at = self.epoch.check_at
        elif now >= self._wait_until:
            self.fail(self._why_waiting or Unavailable("no decode worker is there for this model"))
        else:
            self._check_at = min(now + _LOOK_AGAIN_S, self._wait_until)

    def next_epoch(self) -> GenerateRequest:
        """The request of a new epoch, with all output so far as input. No number is used twice."""
        self._newest_epoch += 1
        return replace(self.request, epoch=self._newest_epoch, forced=tuple(self.tokens))

    def switch(self, request: GenerateRequest, epoch: RoomEpoch, now: float) -> None:
        """The room goes on in this epoch, whose worker has taken its KV over."""
        self._leave_epoch("the room has moved")
        self.request, self.epoch = request, epoch
        self._check_at = epoch.progress(now)

    def _restart(self, cause: RestartCause, why: BatonError, now: float) -> None:
        """Begin a new epoch, on other workers if there are any."""
        pause_s = self._budget.spend(cause)
        if pause_s is None:
            self.fail(self._budget.exhausted(why))
            return
        self._leave_epoch(str(why))
        self.request = self.next_epoch()
        self._why_waiting = why
        self._host.restarted(self, cause)
        self._wait_until = now + self._options.worker_wait_s
        self._check_at = self._paused_until = now + pause_s
        self.tick(now)

    def _leave_epoch(self, abort: str | None) -> None:
        """Free the epoch's workers. With `abort`, a reason, tell them that it is over."""
        epoch, self.epoch = self.epoch, None
        if epoch is not None:
            self._host.unplace(self, epoch.placement)
            epoch.leave(abort)


def _tell(room: RoomStream, sink: RoomSink, delta: OutputDelta) -> None:
    """Give the sink new tokens. If it cannot take them, the room fails alone: other rooms' tokens come in
    the same message, and its client would wait for ever."""
    try:
        stopped = sink.on_tokens(delta, room.cached_tokens)
    except Exception:
        log.exception("request %s: its output cannot be told", room.request.request_id)
        error = RequestFailed("the model's output cannot be told in this form")
        room.stop(str(error))
        sink.on_error(error)
    else:
        if stopped:
            room.stop("stop string")


def _needed(current: RoomEpoch | None, mailbox: str, epoch: int) -> WorkerRecord | None:
    """The worker at an address, if this epoch is the current one and cannot go on without it."""
    return current.needed(mailbox) if current is not None and current.number == epoch else None
