"""LocalWorkers: the exits of worker processes on this router's host, noticed at once.

A pidfd becomes readable when its process has exited. By the time it is opened, the worker may have exited and
the kernel may have given its pid to another process. So the record holds the process's start time, too, which
is compared after the pidfd was opened.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable

from common.host import host_identity, process_start
from wire.records import WorkerRecord

log = logging.getLogger(__name__)


class LocalWorkers:
    """Watches the workers of a view that run on this host. Belongs to one event loop."""

    def __init__(self, on_exit: Callable[[WorkerRecord], None]) -> None:
        self._on_exit = on_exit
        self._host = host_identity()
        self._loop = asyncio.get_running_loop()
        self._seen: dict[str, WorkerRecord] = {}  # by mailbox, which no two incarnations share
        self._pidfds: dict[str, int] = {}  # of those that run

    def update(self, records: Iterable[WorkerRecord]) -> None:
        """Watch these workers, and no others. The exit of each is told once."""
        local = {record.mailbox: record for record in records if self._is_here(record)}
        new = local.keys() - self._seen.keys()
        for mailbox in self._pidfds.keys() - local.keys():
            self._forget(mailbox)
        self._seen = local
        for mailbox in new:
            self._open(local[mailbox])

    def close(self) -> None:
        """Watch nobody."""
        self.update([])

    def _is_here(self, record: WorkerRecord) -> bool:
        return record.host == self._host and record.process_start > 0

    def _open(self, record: WorkerRecord) -> None:
        try:
            pidfd = os.pidfd_open(record.pid)
        except ProcessLookupError:
            self._on_exit(record)
            return
        except OSError as error:
            log.warning("worker %s: process %d cannot be watched: %s", record.id, record.pid, error)
            return
        if process_start(record.pid) != record.process_start:  # another process, or none
            os.close(pidfd)
            self._on_exit(record)
            return
        self._pidfds[record.mailbox] = pidfd
        self._loop.add_reader(pidfd, self._exited, record.mailbox)

    def _exited(self, mailbox: str) -> None:
        self._forget(mailbox)
        self._on_exit(self._seen[mailbox])

    def _forget(self, mailbox: str) -> None:
        pidfd = self._pidfds.pop(mailbox)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
