"""Worker: one engine loop. Mail in, scheduler steps, tokens out.

    take mail -> role.poll (hand-offs) -> scheduler.step (schedule, launch, take result) -> flush tokens

The loop has a thread of its own; asyncio and Ray are never on it. When there is nothing to do it waits for
mail, for a nudge from a transfer thread, or for the next sweep, whichever comes first.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import msgspec

from common.errors import UserError, WireError, WorkerLost
from common.host import host_identity
from kvcache.memory import MemoryReport
from kvcache.report import node_reports
from scheduler.req import Req, RequestLimits
from wire.mailbox import Mail, Mailbox
from wire.messages import (
    Abort,
    Ack,
    Announced,
    AnnounceRefused,
    Decode,
    Inspect,
    Inspected,
    Prefill,
    Receipt,
    Rejected,
    RejectKind,
    Resend,
    kind_of,
)
from wire.records import WorkerRecord
from wire.retransmitter import RetransmitKey, Retransmitter
from wire.security import curve_for
from worker.build import build_engine, build_scheduler, open_publisher
from worker.heartbeat import Heartbeat
from worker.options import WorkerOptions
from worker.outbox import Outbox, OutputKey
from worker.role import Room, Services, WorkerRole
from worker.rooms import Rooms, StartVerdict

log = logging.getLogger(__name__)

_SWEEP_S = 0.25
_LOAD_S = 0.1  # between two looks at the load, while the loop is busy
_DRAIN_SHARE = 0.8  # of the bound: then what is left is handed back to the router


class Worker:
    """A prefill or decode worker: `start`, `healthy` now and then, `drain`, `close`."""

    def __init__(
        self,
        options: WorkerOptions,
        role: type[WorkerRole[Any]],
        resolve_directory: Callable[[], str] | None = None,
    ) -> None:
        """Load the model and build the pools. Raises ConfigError for options that cannot work."""
        self.options = options
        self.id = options.worker_id or f"{role.name}-{secrets.token_hex(3)}"
        self._incarnation = secrets.randbits(62)
        with ExitStack() as owned:  # what is open already is closed again when the rest cannot be had
            self._build(owned, role)
            self._owned = owned.pop_all()
        self._load = self._scheduler.load()
        self._heartbeat: Heartbeat | None = None
        directory = options.directory
        if resolve_directory is None and directory is not None:
            resolve_directory = lambda: directory  # noqa: E731
        if resolve_directory is not None:
            self._heartbeat = Heartbeat(
                self._mailbox, resolve_directory, self.record, options.announce_interval_s
            )
        self._draining = False
        self._drained = threading.Event()
        self._hand_back_at = float("inf")
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._beat_at = time.monotonic()
        self._swept_at = 0.0
        self._load_at = 0.0
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    def _build(self, owned: ExitStack, role: type[WorkerRole[Any]]) -> None:
        """Open every part; each is `owned` as soon as it is open."""
        options = self.options
        self._engine, self._memory = build_engine(options, shared_pool=role.shared_pool)
        owned.callback(self._memory.close)
        owned.callback(self._engine.close)
        self._limits = RequestLimits(
            self._memory.config.max_context_len, self._engine.spec.vocab_size, self._engine.spec.eos_token_ids
        )
        curve = curve_for(options.cluster_secret)
        self._mailbox = Mailbox(options.interface, curve)
        owned.callback(self._mailbox.close)
        self._publisher = open_publisher(options, self._memory, curve, self._mailbox.nudge)
        if self._publisher is not None:
            owned.callback(self._publisher.close)
        self._retransmitter = Retransmitter(self._mailbox.send)
        self._outbox = Outbox(self.id, self._mailbox.send, options.output_lease_s)
        self._rooms: Rooms[Room] = Rooms(2 * options.hand_off_timeout_s, options.hand_off_timeout_s)
        self._role = role(
            Services(
                self.id,
                self._incarnation,
                options,
                self._memory,
                self._mailbox,
                self._retransmitter,
                self._outbox,
                self._rooms,
                lambda policy: build_scheduler(options, self._memory, self._engine, policy, role.phases),
            )
        )
        owned.callback(self._role.close)
        self._scheduler = self._role.scheduler

    # -- life, from other threads ------------------------------------------------------------------

    def start(self) -> WorkerRecord:
        """Run the loop and join the directory. Raises ConfigError when the directory refuses."""
        self._thread.start()
        if self._heartbeat is not None:
            self._heartbeat.start(self.options.join_timeout_s)
        return self.record()

    def record(self) -> WorkerRecord:
        """This worker as routers should see it now."""
        return WorkerRecord(
            id=self.id,
            incarnation=self._incarnation,
            role=self._role.name,
            mailbox=self._mailbox.address,
            events=self._publisher.address if self._publisher else "",
            replay=self._publisher.replay_address if self._publisher else "",
            model=self.options.model_name,
            fingerprint=self._engine.spec.fingerprint,
            groups=self._memory.layouts(),
            max_context_tokens=self._limits.max_context_tokens,
            total_tokens=self._memory.total_tokens,
            max_running_requests=self.options.max_running_requests,
            pid=os.getpid(),
            host=host_identity(),
            transfer_backends=self._role.backends(),
            load=self._load,
            draining=self._draining,
        )

    def healthy(self) -> None:
        """Raises WorkerLost when the engine loop has died or is stuck, ConfigError when refused a lease."""
        if self._failure is not None:
            raise WorkerLost(f"the engine loop of {self.id} died: {self._failure!r}")
        silent_s = time.monotonic() - self._beat_at
        if self._thread.is_alive() and silent_s > self.options.stuck_after_s:
            raise WorkerLost(f"the engine loop of {self.id} has been silent for {silent_s:.0f} s")
        if self._heartbeat is not None:
            self._heartbeat.check()

    def drain(self, bound_s: float) -> bool:
        """Take nothing new; finish what runs, or hand it back to the routers at 80% of `bound_s`.

        Returns whether the worker is empty.
        """
        self._hand_back_at = time.monotonic() + _DRAIN_SHARE * bound_s
        self._draining = True
        self._mailbox.nudge()
        if self._heartbeat is not None:
            self._heartbeat.announce_soon()
        return self._drained.wait(bound_s)

    def close(self) -> None:
        """Leave the directory, end the loop, free everything. Idempotent."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
        self._stop.set()
        self._mailbox.nudge()
        if self._thread.is_alive():
            self._thread.join(timeout=30.0)
        self._owned.close()

    # -- views, on the loop's thread ----------------------------------------------------------------

    def rooms(self) -> list[Room]:
        """The rooms that run here, oldest first."""
        return self._rooms.active()

    def check_memory(self) -> MemoryReport:
        """Balance every pool. Raises AssertionError on a leak."""
        return self._scheduler.check_memory()

    # -- the loop ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            busy = False
            while not self._stop.is_set():
                busy = self.turn(self._mailbox.take() if busy else self._mailbox.wait(_SWEEP_S))
        except BaseException as failure:
            log.exception("the engine loop of %s died", self.id)
            self._failure = failure
            for room in self._rooms.active():
                message = f"worker {self.id} failed: {failure}"
                self._mailbox.send(room.router, Rejected(room.room, room.epoch, RejectKind.FAILED, message))
            self._drained.set()

    def turn(self, mails: list[Mail]) -> bool:
        """One turn of the loop. Whether the scheduler did something: then the next turn should not wait."""
        for mail in mails:
            self._handle(mail)
        self._role.poll(time.monotonic())
        busy = self._scheduler.step()
        self._outbox.flush()
        self._publish()
        self._beat_at = time.monotonic()
        if not busy or self._beat_at - self._load_at >= _LOAD_S:
            self._look_at_load(self._beat_at)
        if self._beat_at - self._swept_at >= _SWEEP_S:
            self._sweep(self._beat_at)
        return busy

    def _publish(self) -> None:
        """What the cache did in this turn; and all that it holds now, when a router needs to hear that."""
        publisher = self._publisher
        if publisher is None:
            return
        publisher.publish(self._memory.cache.take_events())
        if publisher.snapshot_wanted:
            snapshot = self._memory.cache.snapshot()
            assert snapshot is not None, "a publisher and no recorder"
            publisher.publish_snapshot(snapshot)

    def _look_at_load(self, now: float) -> None:
        self._load_at = now
        self._load = self._scheduler.load()
        if self._heartbeat is not None:
            self._heartbeat.on_load(self._load)

    def _sweep(self, now: float) -> None:
        self._swept_at = now
        self._role.sweep(now)
        self._retransmitter.tick(now)
        self._rooms.sweep(now)
        self._outbox.sweep(now)
        if self._draining:
            self._advance_drain(now)

    def _advance_drain(self, now: float) -> None:
        if now >= self._hand_back_at:
            for room in self._rooms.active():
                self._role.fail(room, RejectKind.DRAINING, f"worker {self.id} is leaving")
        if not len(self._rooms) and not self._role.busy and not len(self._retransmitter):
            self._drained.set()

    # -- mail --------------------------------------------------------------------------------------

    def _handle(self, mail: Mail) -> None:
        match mail.message:
            case Prefill() | Decode() as message:
                self._start_room(mail.sender, message)
            case Abort() as message:
                self._mailbox.send(mail.sender, Receipt(message.room, message.epoch, kind_of(message)))
                self._abort_room(message.room, message.epoch)
            case Receipt() as message:
                self._retransmitter.answered(
                    RetransmitKey(mail.sender, message.room, message.epoch, message.of)
                )
            case Ack() as message:
                self._outbox.ack(message.items)
            case Resend() as message:
                self._resend(mail.sender, message)
            case Inspect() as message:
                self._mailbox.send(mail.sender, Inspected(message.token, self._inspect(message.what)))
            case Announced() | AnnounceRefused() as message:
                if self._heartbeat is not None:
                    self._heartbeat.on_answer(message)
            case _:
                self._role.handle(mail)

    def _start_room(self, router: str, message: Prefill | Decode) -> None:
        request = message.request
        kind = kind_of(message)
        self._mailbox.send(router, Receipt(request.room, request.epoch, kind))
        if self._rooms.admission(request.room, request.epoch) is not StartVerdict.NEW:
            return
        older = self._rooms.get(request.room)
        if older is not None:
            self._abort_room(older.room, older.epoch)

        def refuse(why: RejectKind, problem: str) -> None:
            self._rooms.end(request.room, request.epoch, time.monotonic())
            self._mailbox.send(router, Rejected(request.room, request.epoch, why, problem))

        if not isinstance(message, self._role.accepts):
            refuse(RejectKind.INVALID, f"{self.id} is a {self._role.name} worker and takes no {kind}")
        elif self._draining:
            refuse(RejectKind.DRAINING, f"worker {self.id} is leaving")
        else:
            try:
                req = Req.from_request(request, self.options.model_name, self._limits)
            except (UserError, WireError) as error:
                refuse(RejectKind.INVALID, str(error))
                return
            room = self._role.make_room(router, req, message)
            self._rooms.start(room)
            self._role.begin(room)

    def _abort_room(self, room: int, epoch: int) -> None:
        self._retransmitter.forget_room(room, epoch)
        self._outbox.discard(OutputKey(room, epoch))
        state = self._rooms.end(room, epoch, time.monotonic())
        if state is not None:
            self._role.abandon(state)

    def _resend(self, router: str, message: Resend) -> None:
        if self._outbox.resend(OutputKey(message.room, message.epoch), message.start):
            return
        if self._rooms.get(message.room, message.epoch) is None:
            unknown = f"worker {self.id} does not run this room"
            self._mailbox.send(router, Rejected(message.room, message.epoch, RejectKind.UNKNOWN, unknown))

    def _inspect(self, what: str) -> str:
        match what:
            case "memory":
                return json.dumps(asdict(self.check_memory()))
            case "tree":
                return self._memory.cache.pretty_print()
            case "nodes":
                return json.dumps(node_reports(self._memory.cache))
            case "load":
                return msgspec.json.encode(self._load).decode()
            case "metrics":
                return json.dumps(self._scheduler.metrics.report())
            case "rooms":
                return json.dumps([[room.room, room.epoch] for room in self.rooms()])
            case _:
                known = "memory, tree, nodes, load, metrics or rooms"
                return json.dumps({"error": f"unknown report {what!r}: use {known}"})
