"""Membership: the live workers and the directory's other routers, and what changes with them."""

from __future__ import annotations

import asyncio
import time

from common.errors import InvalidRequest
from router.directory.client import DirectoryClient
from router.directory.directory import Directory
from router.directory.server import DirectoryServer
from router.events.event_plane import EventPlane
from router.local_workers import LocalWorkers
from router.options import RouterOptions
from router.placement.models import Models
from router.placement.peers import TELL_AFTER_S, RouterPeers
from router.shared_tenants import SharedTenants
from router.shared_weights import SharedWeights
from router.streams.dispatcher import Dispatcher
from router.suspicions import Suspicions
from router.unanswered import Unanswered
from wire.loop_mailbox import LoopMailbox
from wire.messages.directory import View
from wire.messages.routers import AssignedLoads
from wire.peer_monitors import PeerState
from wire.records import Role, WorkerRecord
from wire.settings import NO_SETTINGS, Settings
from wire.sockets import Mail


class Membership:
    """Watches the directory, and hosts it unless the options name one. Belongs to one event loop."""

    def __init__(
        self,
        options: RouterOptions,
        mailbox: LoopMailbox,
        models: Models,
        events: EventPlane,
        dispatcher: Dispatcher,
        unanswered: Unanswered,
        admin_url: str,
        tenants: SharedTenants,
    ) -> None:
        self.workers: list[WorkerRecord] = []  # live, and of the served models
        self.admins: list[str] = []  # URLs of the routers' admin listeners
        self._mailbox = mailbox
        self._models = models
        self._events = events
        self._dispatcher = dispatcher
        self._unanswered = unanswered
        self.suspicions = Suspicions(dispatcher.gone, models.suspect)
        self._local = LocalWorkers(self._on_exit)
        self._loop = asyncio.get_running_loop()
        self._flush: asyncio.TimerHandle | None = None  # of what the peers are to be told
        self.peers = RouterPeers(models, mailbox.address, time.time_ns(), mailbox.send, self._flush_soon)
        self._server: DirectoryServer | None = None
        if options.directory is None:
            self._server = DirectoryServer(Directory(options.lease_s), mailbox.send)
        configured = {one.served_model_name: one.version_weights for one in options.served}
        self.weights = SharedWeights(models, configured)
        self.tenants = tenants
        self._settings = NO_SETTINGS  # of both
        self._client = DirectoryClient(
            options.directory or mailbox.address, mailbox.send, admin_url, self._all_settings, models.waiting
        )

    @property
    def ready(self) -> bool:
        """A decode worker of any model that takes new work and is not suspected is there."""
        return any(version.serving for version in self._models.versions())

    def mailboxes(self, worker: str | None = None) -> dict[str, str]:
        """The mailboxes of all workers, or of the one that is given, by id. Raises InvalidRequest."""
        found = {record.id: record.mailbox for record in self.workers}
        if worker is None:
            return found
        if worker not in found:
            there = ", ".join(sorted(found)) or "none"
            raise InvalidRequest(f"no worker is called {worker!r}; there are: {there}", "worker")
        return {worker: found[worker]}

    def decode_workers(self, model: str) -> list[WorkerRecord]:
        """A model's decode workers that are not suspected, also those that take no new work."""
        return [
            one
            for one in self.workers
            if one.role is Role.DECODE and one.model == model and one.id not in self.suspicions.suspected
        ]

    def move_directory(self, address: str) -> None:
        """The directory is at `address` now (an actor that was started again)."""
        self._client.move(address)

    def tick(self, now: float) -> None:
        """Renew and end leases, and tell peers what is due."""
        if self._server is not None:
            self._server.tick(now)
        self._client.tick(now)
        self.peers.tick(now)
        self.suspicions.on_silence(self._unanswered.silent(now), now)

    def take(self, mail: Mail, now: float) -> bool:
        """Take a message of the directory, a worker to the directory, or a peer. False for any other."""
        message = mail.message
        if isinstance(message, View):
            if self._client.is_from_directory(mail.sender):
                self._on_view(message, now)
        elif isinstance(message, AssignedLoads):
            self.peers.take(mail.sender, message, now)
        elif self._server is None or not self._server.take(mail, now):
            return False
        return True

    def publish(self, now: float) -> None:
        """Messages have been taken, and no other is there: tell the directory's watchers."""
        if self._server is not None:
            self._server.publish(now)

    def on_peer(self, address: str, state: PeerState) -> None:
        """A peer of this router's mailbox has come up or gone down."""
        now = time.monotonic()
        self.suspicions.on_peer(address, state, now)
        self._dispatcher.admit(now)

    def close(self) -> None:
        """Tell peers nothing more, watch no worker."""
        self._local.close()
        if self._flush is not None:
            self._flush.cancel()

    def _all_settings(self) -> Settings:
        """The same object until something changes."""
        known = self.weights.settings.with_told(self.tenants.settings)
        if known is not self._settings and known != self._settings:
            self._settings = known
        return self._settings

    def _on_exit(self, record: WorkerRecord) -> None:
        now = time.monotonic()
        self.suspicions.on_exit(record, now)
        self._dispatcher.admit(now)

    def _flush_soon(self) -> None:
        self._flush = self._loop.call_later(TELL_AFTER_S, self.peers.flush)

    def _on_view(self, view: View, now: float) -> None:
        change = self._client.take(view)
        served = self._models.by_name
        self.workers = [record for record in self._client.workers.values() if record.model in served]
        self._models.update(self.workers, now)
        self.weights.take(view.settings)
        self.tenants.take(view.settings)
        self.peers.meet(view.routers)
        self.admins = view.admins
        self.suspicions.update(change.lost, self.workers, now)
        for record in change.lost:
            self._events.forget(record.id)
            self._dispatcher.gone(record, "was lost", now)
            self._mailbox.forget(record.mailbox)
        for record in change.joined:
            if record.model in served:
                self._events.follow(record)
        leaving = (one.id for one in self.workers if one.draining and one.role is Role.DECODE)
        self._dispatcher.moves.leave(frozenset(leaving), now)
        self._local.update(self.workers)
        self._mailbox.watch(frozenset(record.mailbox for record in self.workers))
        self._dispatcher.admit(now)
