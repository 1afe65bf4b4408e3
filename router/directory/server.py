"""DirectoryServer: serves a Directory over a mailbox.

It takes Announce, Withdraw and Watch, and answers with Announced, AnnounceRefused and Views. Watchers are
routers. Each View lists them, so that they find each other (router/placement/peers.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from msgspec.structs import replace

from router.directory.directory import Directory
from wire.mailbox import Mail, Mailbox
from wire.messages import Announce, AnnounceRefused, AnyMessage, View, Watch, Withdraw
from wire.security import curve_for

log = logging.getLogger(__name__)

_WATCH_LEASE_S = 5.0
_LOAD_INTERVAL_S = 0.1  # loads alone are passed on at most this often; membership at once


class DirectoryServer:
    """Answers the directory's messages. It has no socket and no thread: a mailbox's owner passes it mail."""

    def __init__(self, directory: Directory, send: Callable[[str, AnyMessage], None]) -> None:
        self._directory = directory
        self._send = send
        self._watchers: dict[str, float] = {}  # mailbox address -> until when
        self._told_version = -1
        self._watchers_changed = False
        self._load_changed = False
        self._next_loads_at = 0.0

    def handle(self, mail: Mail, now: float) -> bool:
        """Take a message to the directory. Returns False for any other."""
        message = mail.message
        if isinstance(message, Announce):
            answer = self._directory.announce(message, now)
            if isinstance(answer, AnnounceRefused):
                log.warning("refused worker %s: %s: %s", answer.worker, answer.key, answer.problem)
            else:
                self._load_changed = True
            self._send(mail.sender, answer)
        elif isinstance(message, Withdraw):
            self._directory.withdraw(message)
        elif isinstance(message, Watch):
            if mail.sender not in self._watchers:
                self._watchers_changed = True
            self._watchers[mail.sender] = now + _WATCH_LEASE_S
            self._send(mail.sender, self._view())
        else:
            return False
        self._publish(now)
        return True

    def tick(self, now: float) -> None:
        """End leases and tell the watchers. Call it several times per lease."""
        for record in self._directory.expire(now):
            log.warning("the lease of worker %s ended", record.id)
        for address, until in list(self._watchers.items()):
            if until < now:
                del self._watchers[address]
                self._watchers_changed = True
        self._publish(now)

    def _publish(self, now: float) -> None:
        membership = self._watchers_changed or self._directory.version != self._told_version
        if not membership and not (self._load_changed and now >= self._next_loads_at):
            return
        self._told_version = self._directory.version
        self._load_changed = self._watchers_changed = False
        self._next_loads_at = now + _LOAD_INTERVAL_S
        view = self._view()
        for address in self._watchers:
            self._send(address, view)

    def _view(self) -> View:
        return replace(self._directory.view(), routers=sorted(self._watchers))


class DirectoryHost:
    """A directory with a mailbox and a thread of its own, for use without a router (cluster/, tests)."""

    def __init__(
        self, interface: str = "127.0.0.1", cluster_secret: str | None = None, lease_s: float = 3.0
    ) -> None:
        self._mailbox = Mailbox(interface, curve_for(cluster_secret))
        self.address = self._mailbox.address
        self._server = DirectoryServer(Directory(lease_s, time.time_ns() // 1_000_000), self._mailbox.send)
        self._tick_s = min(0.1, lease_s / 10)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="directory", daemon=True)
        self._thread.start()

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
        while not self._closing.is_set():
            mail = self._mailbox.wait(self._tick_s)
            now = time.monotonic()
            for one in mail:
                if not self._server.handle(one, now):
                    log.warning("the directory does not take %s", type(one.message).__name__)
            self._server.tick(now)
