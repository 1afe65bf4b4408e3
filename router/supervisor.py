"""Supervisor: starts the processes of a router (`python -m router --processes N`), and outlives them.

It serves no request for tokens, so nothing that such a request does can end it. It hosts the directory unless
the options name one, starts a process again that has ended, and has the pages of the admin listener.
"""

from __future__ import annotations

import asyncio
import logging
import time

from prometheus_client import CollectorRegistry

from router.directory.directory import Directory
from router.directory.server import DirectoryServer
from router.options import RouterOptions
from router.page import Page
from router.process_group import OwnLists, ProcessGroup
from router.processes import RouterProcesses
from router.streams.inspections import Inspections
from router.trace import TraceStore
from wire.holds import Hold
from wire.loop_mailbox import LoopMailbox
from wire.messages.caches import Inspect, Inspected
from wire.peer_monitors import PeerState
from wire.security import curve_for
from wire.sockets import Mail

log = logging.getLogger(__name__)

_TICK_S = 0.05


class Supervisor:
    """Lives on the event loop on which it is made. Close it there."""

    def __init__(self, options: RouterOptions, options_file: str, port: int, admin_url: str) -> None:
        """Bind the mailbox. The processes will read `options_file`, serve HTTP on `port`, and announce that
        `open_page` is served at `admin_url`."""
        self._mailbox = LoopMailbox(
            options.interface,
            curve_for(options.secret()),
            self._on_mail,
            self._on_peer,
            options.ports.of("mailboxes"),
        )
        self.mailbox_address = self._mailbox.address
        send = self._mailbox.send
        self._inspections = Inspections(send)
        own = OwnLists(holds=self._holds)
        self._group = ProcessGroup(
            CollectorRegistry(), TraceStore(), send, self._inspections, own, None,
            compat=options.metrics_compat,
        )  # fmt: skip
        self._directory: DirectoryServer | None = None
        if options.directory is None:
            self._directory = DirectoryServer(Directory(options.lease_s), send)
        directory = options.directory or self.mailbox_address
        arguments = (
            "--options",
            options_file,
            "--further",
            directory,
            str(port),
            self.mailbox_address,
            admin_url,
        )
        resume_key = options.shared_resume_key()
        self._processes = RouterProcesses(arguments, self._group, resume_key)
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_soon(self._tick)

    async def start(self, count: int) -> None:
        """Returns when `count` processes serve. Raises ProcessFailed when one does not."""
        await self._processes.start(count)

    async def open_page(self, target: str) -> Page:
        """The admin page at a path with its query. Raises Unavailable."""
        return await self._group.page(target)

    async def close(self) -> None:
        """End the processes, then the directory."""
        await self._processes.close()
        self._timer.cancel()
        self._group.close()
        self._mailbox.close()

    def _holds(self) -> list[Hold]:
        return self._mailbox.connections(f"router supervisor {self.mailbox_address}", time.monotonic())

    def _tick(self) -> None:
        self._timer = self._loop.call_later(_TICK_S, self._tick)
        if self._directory is not None:
            self._directory.tick(time.monotonic())

    def _on_mail(self, batch: list[Mail]) -> None:
        now = time.monotonic()
        for mail in batch:
            try:
                self._take(mail, now)
            except Exception:  # others wait for the rest of the batch
                log.exception("%s from %s cannot be taken", type(mail.message).__name__, mail.sender)
        if self._directory is not None:
            self._directory.publish(now)

    def _take(self, mail: Mail, now: float) -> None:
        if self._directory is not None and self._directory.take(mail, now):
            return
        if isinstance(mail.message, Inspected):
            self._inspections.answer(mail.message)
        elif isinstance(mail.message, Inspect):
            self._group.answer(mail.sender, mail.message)

    def _on_peer(self, address: str, state: PeerState) -> None:
        """Leases and exit codes tell who is gone."""
