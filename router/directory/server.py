"""DirectoryServer: serves a Directory over a mailbox.

It takes Join, Announce, Withdraw and Watch, and answers with Joined, Announced, AnnounceRefused, Replaced and
Views. What its owner tells workers of their roles is answered with RoleSet. Watchers are routers. Each View
lists them, so that they find each other (router/placement/peers.py).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from common.ports import ANY_PORT, Ports
from common.quiet_log import QuietLog
from common.secrets import ClusterSecret
from router.directory.directory import Directory
from wire.addresses import same_process
from wire.mailbox import Mail, Mailbox
from wire.messages.any_message import AnyMessage
from wire.messages.directory import (
    Announce,
    Announced,
    AnnounceRefused,
    Join,
    RoleSet,
    SetRole,
    View,
    Watch,
    Withdraw,
)
from wire.records import Role, WorkerRecord
from wire.security import curve_for
from wire.settings import NO_SETTINGS, Settings

log = logging.getLogger(__name__)

_WATCH_LEASE_S = 5.0
_LOAD_INTERVAL_S = 0.1  # loads alone are passed on at most this often; membership at once


class RoleOrders(NamedTuple):
    """Workers that are to be asked, now, to take a role, and settings of which all are to be told."""

    asked: Sequence[tuple[WorkerRecord, Role]] = ()
    said: Settings = NO_SETTINGS


AssignRoles = Callable[[list[WorkerRecord], Settings, float], RoleOrders]
"""Takes the live workers, what the directory knows, and the time."""


@dataclass(slots=True)
class _Watcher:
    until: float
    number: int = 0  # of its last Watch
    admin: str = ""  # URL of its admin listener
    waiting: Mapping[str, float] = field(default_factory=dict)  # rooms, by worker


class DirectoryServer:
    """Answers the directory's messages. It has no socket and no thread: a mailbox's owner passes it mail."""

    def __init__(
        self,
        directory: Directory,
        send: Callable[[str, AnyMessage], None],
        on_lost: Callable[[WorkerRecord], None] | None = None,
    ) -> None:
        """`on_lost` is told of each worker whose lease ended a lease ago and that has not come back."""
        self._directory = directory
        self._send = send
        self._on_lost = on_lost
        self._watchers: dict[str, _Watcher] = {}  # by mailbox address
        self._told_version = -1
        self.settings = NO_SETTINGS
        self._watchers_changed = False
        self._settings_changed = False
        self._load_changed = False
        self._next_loads_at = 0.0
        self._quiet = QuietLog(log)

    def take(self, mail: Mail, now: float) -> bool:
        """Take a message to the directory. Returns False for any other. Call `publish` after the last one of
        those that have come: a View for each of many workers that join would list all of them each time."""
        message = mail.message
        if isinstance(message, Join):
            joined = self._directory.join(message, now)
            if joined is not None:
                self._send(mail.sender, joined)
        elif isinstance(message, Announce):
            self._announce(mail.sender, message, now)
        elif isinstance(message, Withdraw):
            record = self._directory.record(message.worker)
            if record is None or same_process(mail.sender, record.mailbox):
                self._directory.withdraw(message)
        elif isinstance(message, Watch):
            self._watch(mail.sender, message, now)
        elif isinstance(message, RoleSet):
            if message.problem:
                self._quiet.warning("%s is no %s worker: %s", message.worker, message.role, message.problem)
        else:
            return False
        return True

    def tick(self, now: float) -> None:
        """End leases and tell the watchers. Call it several times per lease."""
        for record in self._directory.expire(now):
            log.warning("the lease of worker %s ended", record.id)
        for record in self._directory.lost(now):
            if self._on_lost is not None:
                self._on_lost(record)
        for address, watcher in list(self._watchers.items()):
            if watcher.until < now:
                del self._watchers[address]
                self._watchers_changed = True
        self.publish(now)

    def publish(self, now: float) -> None:
        """Tell the watchers what has changed, if that is due."""
        if now < self._directory.settles_at:
            return
        changed = self._watchers_changed or self._settings_changed
        membership = changed or self._directory.version != self._told_version
        if not membership and not (self._load_changed and now >= self._next_loads_at):
            return
        if self._settings_changed:
            self._tell_workers()
        self._told_version = self._directory.version
        self._load_changed = self._watchers_changed = self._settings_changed = False
        self._next_loads_at = now + _LOAD_INTERVAL_S
        for address in self._watchers:
            self._send_view(address)

    def say(self, said: Settings, now: float) -> None:
        """Tell all what the directory's owner says. Nothing new changes nothing."""
        self._learn(said)
        if self._settings_changed:
            self.publish(now)

    def records(self, now: float) -> list[WorkerRecord]:
        """The live workers; none while workers of an earlier directory may be on their way back."""
        return self._directory.records() if now >= self._directory.settles_at else []

    def worker_count(self) -> int:
        """How many workers have joined. Any thread may ask."""
        return len(self._directory)

    def admins(self) -> list[str]:
        """URLs of the routers' admin listeners. Any thread may ask."""
        return sorted({watcher.admin for watcher in list(self._watchers.values()) if watcher.admin})

    def _announce(self, worker: str, message: Announce, now: float) -> None:
        if not same_process(worker, message.record.mailbox):
            self._quiet.warning("%s announces a worker that is at %s", worker, message.record.mailbox)
            return
        answer = self._directory.announce(message, now)
        if isinstance(answer, Announced):
            self._learn(message.settings)
            answer = self._announced(message.record)
            self._load_changed = True
        elif isinstance(answer, AnnounceRefused):
            log.warning("refused worker %s: %s: %s", answer.worker, answer.key, answer.problem)
        else:
            log.warning("worker %s at %s was replaced, and is refused", answer.worker, worker)
        self._send(worker, answer)

    def _watch(self, router: str, message: Watch, now: float) -> None:
        watcher = self._watchers.get(router)
        if watcher is None:
            watcher = self._watchers[router] = _Watcher(now)
            self._watchers_changed = True
        watcher.number = max(watcher.number, message.number)
        if watcher.admin != message.admin:
            watcher.admin = message.admin
            self._watchers_changed = True
        watcher.waiting = message.waiting
        watcher.until = now + _WATCH_LEASE_S
        self._directory.remember(message.seen)
        self._learn(message.settings)
        if now >= self._directory.settles_at:
            self._send_view(router)

    def _learn(self, told: Settings) -> None:
        known = self.settings.with_told(told)
        self._settings_changed = self._settings_changed or known is not self.settings
        self.settings = known

    def _tell_workers(self) -> None:
        """Before their next Announce: until then only routers would know what was said, and they may end
        together with the directory."""
        for record in self._directory.records():
            self._send(record.mailbox, self._announced(record))

    def _announced(self, record: WorkerRecord) -> Announced:
        waiting = sum(one.waiting.get(record.id, 0.0) for one in self._watchers.values())
        return Announced(record.id, record.incarnation, self._directory.lease_s, self.settings, waiting)

    def _send_view(self, router: str) -> None:
        directory, number = self._directory, self._watchers[router].number
        routers, admins = sorted(self._watchers), self.admins()
        view = View(number, directory.version, directory.records(), routers, admins, self.settings)
        self._send(router, view)


def end_process() -> None:
    """End this process, so that whoever started it starts another: Ray an actor, an operator's supervisor a
    command."""
    os._exit(1)


class DirectoryHost:
    """A directory with a mailbox and a thread of its own, for use without a router (cluster/, tests)."""

    def __init__(
        self,
        interface: str = "127.0.0.1",
        secret: ClusterSecret | None = None,
        lease_s: float = 3.0,
        port: int = 0,
        *,
        ports: Ports = ANY_PORT,
        is_new: bool = True,
        on_lost: Callable[[WorkerRecord], None] | None = None,
        assign_roles: AssignRoles = lambda _records, _settings, _now: RoleOrders(),
        on_failed: Callable[[], None] = end_process,
    ) -> None:
        """At `port`, or if it is 0 at one of `ports`. `is_new`: no worker of an earlier directory will find
        this one. Otherwise it settles first. `on_lost`, `assign_roles` and `on_failed` are called on its
        thread, the last one when a thread has failed: leases that nobody renews would end, and every worker
        would be taken for lost. Raises ConfigError for a port that cannot be had.
        """
        self._mailbox = Mailbox(interface, curve_for(secret, fixed_address=port != 0), port, ports=ports)
        self.address = self._mailbox.address
        directory = Directory(lease_s, 0.0 if is_new else time.monotonic() + lease_s)
        self._server = DirectoryServer(directory, self._mailbox.send, on_lost)
        self._assign_roles = assign_roles
        self._on_failed = on_failed
        self._quiet = QuietLog(log)
        self._tick_s = min(0.1, lease_s / 10)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="directory", daemon=True)
        self._thread.start()

    def worker_count(self) -> int:
        """How many workers have joined."""
        return self._server.worker_count()

    def admins(self) -> list[str]:
        """URLs of the routers' admin listeners."""
        return self._server.admins()

    def close(self) -> None:
        """Stop serving. Watchers keep their last view."""
        self._closing.set()
        self._thread.join(timeout=5.0)
        self._mailbox.close()

    def __enter__(self) -> DirectoryHost:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._turn()
        except Exception:
            log.exception("the directory has failed")
            self._on_failed()

    def _turn(self) -> None:
        mail = self._mailbox.wait(self._tick_s)
        if not self._mailbox.running:
            raise RuntimeError("a thread of the directory's mailbox has ended")
        now = time.monotonic()
        for one in mail:
            if not self._server.take(one, now):
                self._quiet.warning("the directory does not take %s", type(one.message).__name__)
        self._server.tick(now)
        orders = self._assign_roles(self._server.records(now), self._server.settings, now)
        self._server.say(orders.said, now)
        for record, role in orders.asked:
            self._mailbox.send(record.mailbox, SetRole(role))
