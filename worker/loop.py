"""Worker: one engine loop. Mail in, scheduler steps, tokens out.

    take mail -> role.poll (hand-offs) -> scheduler.step (schedule, launch, take result) -> flush tokens

The loop has a thread of its own; asyncio and Ray never run on it. When there is nothing to do it waits for
mail, for a nudge from another thread, or for the next sweep, whichever comes first.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from common.errors import WorkerLost
from common.host import host_identity, process_start
from engine.batch import NoticesLoss
from engine.errors import DeviceLost
from kvcache.memory import MemoryReport
from scheduler.rates import FORWARD_FACTOR
from scheduler.req import RequestLimits
from wire.mailbox import Mail, Mailbox
from wire.messages.rooms import Rejected, RejectKind
from wire.records import Role, WorkerRecord
from worker.drain import Drain
from worker.figures import LoadLook, worker_figures
from worker.forgetting import TenantForgetting
from worker.heartbeat import Heartbeat
from worker.holds import swept_holds
from worker.idle_check import IdleCheck
from worker.lost_peers import LostPeers
from worker.mail import MailHandler, keep_role
from worker.options import WorkerOptions
from worker.parts import ModelParts, open_parts
from worker.role import Room, WorkerRole
from worker.watchdog import Watchdog, Watched

log = logging.getLogger(__name__)

_SWEEP_S = 0.25
_THREAD_BOUND_S = 2.0  # for a round of a thread that only moves messages
_LOAD_S = 0.1  # between two looks at the load, while the loop is busy


class Worker:
    """A prefill or decode worker: `start`, `healthy` now and then, `drain`, `close`."""

    def __init__(
        self,
        options: WorkerOptions,
        role: type[WorkerRole[Any]],
        resolve_directory: Callable[[], str] | None = None,
        kept: ModelParts | None = None,
        set_role: Callable[[Role], str] = keep_role,
    ) -> None:
        """Load the model and build the pools. Raises ConfigError for options that cannot work.

        `resolve_directory` finds the address of a directory that may move; without it the worker announces
        itself at `options.directory`, or to nobody. `kept` is the model of a worker that is over: nothing is
        loaded, and `close` does not close it. `set_role` is called when the directory asks for another role;
        it begins the change, or returns why there is none.
        """
        self.options = options
        self.parts = open_parts(options, role, kept)
        self.id = self.parts.services.worker_id
        self._services = self.parts.services
        self._role = self.parts.role
        self._scheduler = self._role.scheduler
        self._load = LoadLook(self._scheduler.load(), time.monotonic(), time.monotonic())
        self._figures = worker_figures(self._services.memory, self._scheduler.metrics)
        self._process_start = process_start(os.getpid())
        self._limits = RequestLimits(
            self._services.memory.config.max_context_len,
            self.parts.engine.spec.vocab_size,
            self.parts.engine.spec.eos_token_ids,
            self.parts.engine.grammars,
        )
        self._drain = Drain()
        self._heartbeat = self._open_heartbeat(resolve_directory)
        services = self._services
        self._forgetting = TenantForgetting(services.memory, services.rooms, services.mailbox.send)
        self._mail = MailHandler(
            services, self._role, self._limits, self._drain, self._heartbeat, set_role, self._forgetting
        )
        self._idle_check = IdleCheck(self._scheduler, self.options.idle_check_interval_s)
        self._lost_peers = LostPeers()
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self.beats = 0  # turns of the loop
        self._beat_at = time.monotonic()
        self._swept_at = 0.0
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)
        self._watchdog = Watchdog(self._watched(), self._give_up)

    def _watched(self) -> list[Watched]:
        watched = [
            Watched("engine loop", self, self._turn_bound_s),
            Watched("mailbox thread", self._services.mailbox, lambda: _THREAD_BOUND_S),
        ]
        if self.parts.publisher is not None:
            watched.append(Watched("event thread", self.parts.publisher, lambda: _THREAD_BOUND_S))
        return watched

    def _open_heartbeat(self, resolve_directory: Callable[[], str] | None) -> Heartbeat | None:
        directory = self.options.directory
        if resolve_directory is None and directory is not None:
            resolve_directory = lambda: directory  # noqa: E731
        if resolve_directory is None:
            return None
        interval_s = self.options.announce_interval_s
        return Heartbeat(self._services.mailbox, resolve_directory, self.id, self.record, interval_s)

    # -- life, from other threads ------------------------------------------------------------------

    def start(self) -> WorkerRecord:
        """Run the loop and join the directory. Raises ConfigError when the directory refuses, WorkerLost when
        another process has joined in this one's place."""
        self._thread.start()
        self._watchdog.start()
        if self._heartbeat is not None:
            self._heartbeat.start(self.options.join_timeout_s)
        return self.record()

    def record(self) -> WorkerRecord:
        """This worker as routers should see it now."""
        look, turned_at = self._load, self._beat_at  # before the time, as the loop may replace them now
        services, publisher, spec = self._services, self.parts.publisher, self.parts.engine.spec
        load, heartbeat = look.aged(turned_at, time.monotonic()), self._heartbeat
        if heartbeat is not None:
            load = replace(load, waiting_in_routers=heartbeat.waiting_in_routers)
        return WorkerRecord(
            id=self.id,
            incarnation=heartbeat.incarnation if heartbeat is not None else 0,
            role=self._role.name,
            mailbox=services.mailbox.address,
            events=publisher.public.address if publisher else "",
            replay=publisher.public.replay_address if publisher else "",
            private_events=publisher.private.address if publisher else "",
            private_replay=publisher.private.replay_address if publisher else "",
            model=self.options.model_name,
            fingerprint=spec.fingerprint,
            version=self.options.model_version,
            groups=services.memory.layouts(),
            shares_pages=services.memory.promotion is not None,
            max_context_tokens=self._limits.max_context_tokens,
            total_tokens=services.memory.total_tokens,
            host_tokens=services.memory.host_tokens,
            peer_fetch=self.options.peer_fetch,
            max_running_requests=self.options.max_running_requests,
            pid=os.getpid(),
            process_start=self._process_start,
            host=host_identity(),
            rack=self.options.rack,
            transfer_backends=self._role.backends(),
            load=load,
            figures=self._figures,
            draining=self._drain.begun,
            swept=swept_holds(services),
        )

    def healthy(self) -> None:
        """Raises WorkerLost when a thread has died or is stuck or another process has taken this one's place,
        ConfigError when refused a lease."""
        if self._failure is not None:
            raise WorkerLost(f"the engine loop of {self.id} died: {self._failure!r}")
        if self._watchdog.failure is not None:
            raise WorkerLost(f"{self.id}: {self._watchdog.failure}")
        if isinstance(self.parts.engine, NoticesLoss):
            try:
                self.parts.engine.check()
            except DeviceLost as error:
                raise WorkerLost(f"{self.id}: {error}") from error
        if self._heartbeat is not None:
            self._heartbeat.check()

    def drain(self, bound_s: float) -> bool:
        """Start no new room; finish those that run, or hand them back to the routers near `bound_s`.

        Returns whether the worker is empty.
        """
        self._drain.begin(time.monotonic(), bound_s)
        self._services.mailbox.nudge()
        if self._heartbeat is not None:
            self._heartbeat.announce_soon()
        return self._drain.wait(bound_s)

    def close(self) -> None:
        """Leave the directory, end the loop, free everything. Idempotent."""
        self._watchdog.close()
        if self._heartbeat is not None:
            self._heartbeat.stop()
        self._stop.set()
        self._services.mailbox.nudge()
        if self._thread.is_alive():
            self._thread.join(timeout=30.0)
        self._drain.finish()
        self.parts.owned.close()

    # -- when a thread has failed, on the watchdog's thread ------------------------------------------

    def _turn_bound_s(self) -> float:
        """How long a turn of the loop may take. A forward of a kind without a rate may compile kernels."""
        if self._idle_check.confirming:
            return math.inf
        bound, expected = self.options.stuck_after_s, self._scheduler.expected_s
        return self.options.first_forward_s if math.isinf(expected) else max(bound, FORWARD_FACTOR * expected)

    def _give_up(self, why: str) -> None:
        """Leave at once and for good: the directory, so that routers restart the rooms, and the rooms.

        The worker's own mailbox may be what has failed, so that another one tells the directory.
        """
        self._stop.set()
        self._drain.finish()
        mailbox, message = self._services.mailbox, f"worker {self.id} failed: {self._failure or why}"
        for room in self.rooms():
            mailbox.send(room.router, Rejected(room.room, room.epoch, RejectKind.FAILED, message))
        if self._heartbeat is not None:
            # On any port: it only sends, and its range may be used up.
            with Mailbox(self.options.interface, self.parts.curve, key=mailbox.key) as another:
                self._heartbeat.stop(through=another)

    # -- views, on the loop's thread ----------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether the engine loop lives."""
        return self._thread.is_alive() and self._failure is None

    def rooms(self) -> list[Room]:
        """The rooms that run here, oldest first."""
        return self._services.rooms.active()

    def check_memory(self) -> MemoryReport:
        """Balance every pool. Raises AssertionError on a leak."""
        return self._scheduler.check_memory()

    # -- the loop ----------------------------------------------------------------------------------

    def _run(self) -> None:
        mailbox = self._services.mailbox
        try:
            at_once = False
            while not self._stop.is_set():
                busy = self.turn(mailbox.take() if at_once else mailbox.wait(_SWEEP_S))
                at_once = busy or self._idle_check.running
        except BaseException as failure:
            log.exception("the engine loop of %s died", self.id)
            self._failure = failure
            self._watchdog.look_now()

    def turn(self, mails: list[Mail]) -> bool:
        """One turn of the loop. Whether the scheduler did something: then the next turn must not wait."""
        began_at = time.monotonic()
        for mail in mails:
            self._mail.handle(mail)
        for address, state in self._services.mailbox.take_peers().items():
            self._role.on_peer(address, state, self._lost_peers.is_lost(address, state, began_at))
        now = time.monotonic()
        self._role.poll(now)
        self._role.lending.poll(now)
        self._role.fetching.poll(now)
        busy = self._scheduler.step()
        self._services.outbox.flush()
        self._publish()
        self.beats += 1
        self._beat_at = time.monotonic()
        if not busy or self._beat_at - self._load.taken_at >= _LOAD_S:
            self._update_load(began_at, self._beat_at)
        if self._beat_at - self._swept_at >= _SWEEP_S:
            self._sweep(self._beat_at)
        self._idle_check.turn(not busy and self._scheduler.idle, self._beat_at)
        return busy

    def _publish(self) -> None:
        """Publish what the cache did in this turn, and a snapshot of it when a router needs one."""
        publisher = self.parts.publisher
        if publisher is None:
            return
        memory = self._services.memory
        publisher.publish(*memory.take_events())
        if publisher.snapshot_wanted:
            publisher.publish_snapshot(*memory.snapshot())

    def _update_load(self, mail_at: float, now: float) -> None:
        load = self._scheduler.load()
        load = replace(load, waiting_requests=load.waiting_requests + len(self._role.waiting))
        self._load = LoadLook(load, now, mail_at)
        self._figures = worker_figures(self._services.memory, self._scheduler.metrics)
        if self._heartbeat is not None:
            self._heartbeat.on_load(self._load.load)

    def _sweep(self, now: float) -> None:
        self._swept_at = now
        self._role.sweep(now)
        self._role.orphans.sweep(now)
        self._role.lending.sweep(now)
        self._services.mailbox.watch(self._peers())
        self._services.transfer.drop_idle(now)
        self._services.retransmitter.tick(now)
        self._services.rooms.sweep(now)
        self._services.outbox.sweep(now)
        if (promotion := self._services.memory.promotion) is not None:
            promotion.tick(now)
        self._forgetting.tick(now)
        if self._drain.begun:
            self._advance_drain(now)

    def _peers(self) -> frozenset[str]:
        """The mailboxes for which something waits here."""
        rooms = frozenset(peer for room in self.rooms() for peer in room.peers)
        return rooms | self._role.fetching.holders | self._role.lending.requesters

    def _advance_drain(self, now: float) -> None:
        if self._drain.must_hand_back(now):
            for room in self.rooms():
                self._role.fail(room, RejectKind.DRAINING, f"worker {self.id} is leaving")
        services, idle = self._services, self._scheduler.idle  # idle: no forward is under way either
        if not idle or len(services.rooms) or self._role.busy:
            return
        # A receiver that is down sees that this worker has left, if it ever comes back.
        if all(map(self._lost_peers.is_down, services.retransmitter.receivers)):
            self._drain.finish()
