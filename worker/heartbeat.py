"""Heartbeat: renews a worker's lease at the directory, on a thread of its own.

It is not on the engine loop because a forward may take longer than a lease, and because finding a restarted
directory may block. The loop reports its load; when that has changed, the thread announces it at once rather
than at the next renewal, so that routers choose by recent figures.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from common.errors import ConfigError
from wire.mailbox import Mailbox
from wire.messages import Announce, Announced, AnnounceRefused, Withdraw
from wire.records import WorkerLoad, WorkerRecord

log = logging.getLogger(__name__)

_GAP_S = 0.1  # least time between two announcements


def has_moved(announced: WorkerLoad, now: WorkerLoad) -> bool:
    """Whether a router might choose differently: a figure differs by more than an eighth, or from or to 0."""
    requests = announced.running_requests + announced.waiting_requests
    return (
        _differ(announced.queued_prefill_tokens, now.queued_prefill_tokens)
        or _differ(requests, now.running_requests + now.waiting_requests)
        or _differ(announced.headroom_tokens, now.headroom_tokens)
        or _differ(announced.headroom_rows, now.headroom_rows)
        or (announced.prefill_tokens_per_s > 0) != (now.prefill_tokens_per_s > 0)
        or (announced.decode_step_s > 0) != (now.decode_step_s > 0)
    )


def _differ(one: int, other: int) -> bool:
    return 8 * abs(one - other) > max(one, other)


class Heartbeat:
    """Announces the worker's record every `interval_s`. `resolve` finds the directory's mailbox address."""

    def __init__(
        self,
        mailbox: Mailbox,
        resolve: Callable[[], str],
        record: Callable[[], WorkerRecord],
        interval_s: float,
    ) -> None:
        self._mailbox = mailbox
        self._resolve = resolve
        self._record = record
        self._interval_s = interval_s
        self._address: str | None = None
        self._answered_at = 0.0
        self._announced = WorkerLoad()
        self._stop = threading.Event()
        self._soon = threading.Event()
        self._joined = threading.Event()
        self._refusal: AnnounceRefused | None = None
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self, timeout_s: float) -> None:
        """Join the directory. Raises ConfigError when it refuses the record or does not answer."""
        self._thread.start()
        if not self._joined.wait(timeout_s):
            self.stop()
            raise ConfigError(
                "directory",
                f"no answer within {timeout_s:.0f} s",
                "check the address and that the router runs",
            )
        self.check()

    def check(self) -> None:
        """Raises ConfigError when the directory has refused this worker."""
        if self._refusal is not None:
            raise ConfigError(self._refusal.key, self._refusal.problem, self._refusal.remedy)

    def on_answer(self, answer: Announced | AnnounceRefused) -> None:
        """The directory has answered. Called on the thread that reads the mailbox."""
        if isinstance(answer, AnnounceRefused):
            self._refusal = answer
        else:
            self._answered_at = time.monotonic()
        self._joined.set()

    def on_load(self, load: WorkerLoad) -> None:
        """The record has this load from now on. Called on the engine loop; does not block."""
        if has_moved(self._announced, load):
            self._soon.set()

    def announce_soon(self) -> None:
        """Announce the record now, because something has changed that routers need at once (draining)."""
        if self._address is not None:
            record = self._record()
            self._announced = record.load
            self._mailbox.send(self._address, Announce(record))

    def stop(self) -> None:
        """Stop announcing and leave the directory."""
        self._stop.set()
        self._soon.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        if self._address is not None:
            record = self._record()
            self._mailbox.send(self._address, Withdraw(record.id, record.incarnation))

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._address is None or time.monotonic() - self._answered_at > 3 * self._interval_s:
                self._find_directory()
            self._soon.clear()
            self.announce_soon()
            self._stop.wait(min(_GAP_S, self._interval_s))
            self._soon.wait(max(0.0, self._interval_s - _GAP_S))

    def _find_directory(self) -> None:
        try:
            address = self._resolve()
        except Exception as error:  # noqa: BLE001  whatever the resolver uses may fail while it restarts
            log.warning("the directory cannot be found, trying again: %s", error)
            return
        if address != self._address and self._address is not None:
            self._mailbox.forget(self._address)
        self._address = address
