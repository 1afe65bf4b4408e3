"""Heartbeat: joins the directory, and renews the worker's lease there, on a thread of its own.

The worker gets its incarnation from the directory before it announces itself. When the directory says that a
newer process has joined under its id, this one is over: it announces nothing more, and is unhealthy.

It is not on the engine loop because a forward may take longer than a lease, and because finding a restarted
directory may block. The loop reports its load; when that has changed, the thread announces it at once rather
than at the next renewal, so that routers choose by recent figures.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable

from common.errors import ConfigError, WorkerLost
from wire.addresses import is_directory
from wire.mailbox import Mailbox
from wire.messages.directory import Announce, Announced, AnnounceRefused, Join, Joined, Replaced, Withdraw
from wire.records import WorkerLoad, WorkerRecord
from wire.settings import NO_SETTINGS

log = logging.getLogger(__name__)

_GAP_S = 0.1  # least time between two announcements
_JOIN_S = 0.25  # between two Joins
_SHARE = 1 / 3  # of a lease, at most, between two renewals: one of them may be lost

DirectoryAnswer = Joined | Announced | AnnounceRefused | Replaced


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
        worker: str,
        record: Callable[[], WorkerRecord],
        interval_s: float,
    ) -> None:
        """`record` is the record of `worker`, with this object's `incarnation`. The interval is shorter where
        the directory's lease asks for it."""
        self.incarnation = 0  # 0: not joined yet
        self._mailbox = mailbox
        self._resolve = resolve
        self._worker = worker
        self._nonce = secrets.randbits(62) + 1
        self._record = record
        self._longest_s = interval_s
        self._lease_s = math.inf  # until the directory has said it
        self._address: str | None = None
        self._answered_at = 0.0
        self._announced = WorkerLoad()
        self._settings = NO_SETTINGS  # kept for a directory that is started again
        self._waiting = 0.0  # by the last answer
        self._stop = threading.Event()
        self._soon = threading.Event()
        self._answered = threading.Event()
        self._refusal: ConfigError | WorkerLost | None = None
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self, timeout_s: float) -> None:
        """Join the directory. Raises ConfigError when it refuses the record or does not answer, WorkerLost
        when another process has joined meanwhile."""
        self._thread.start()
        if not self._answered.wait(timeout_s):
            self.stop()
            raise ConfigError(
                "directory",
                f"no answer within {timeout_s:.0f} s",
                "check the address and that the router runs",
            )
        self.check()

    def check(self) -> None:
        """Raises ConfigError when the directory has refused this worker, WorkerLost when it was replaced."""
        if self._refusal is not None:
            raise self._refusal

    def on_answer(self, answer: DirectoryAnswer) -> None:
        """The directory has answered. Called on the thread that reads the mailbox."""
        match answer:
            case Joined():
                if answer.nonce == self._nonce and not self.incarnation:
                    self._lease_s = answer.lease_s
                    self.incarnation = answer.incarnation
                    self._soon.set()
                return
            case Announced():
                self._answered_at, self._lease_s = time.monotonic(), answer.lease_s
                self._settings = self._settings.with_told(answer.settings)
                self._waiting = answer.waiting
            case AnnounceRefused():
                self._refusal = ConfigError(answer.key, answer.problem, answer.remedy)
            case Replaced():
                self._refusal = WorkerLost(f"another process has joined as {self._worker}: this one is over")
                self._stop.set()
                self._soon.set()
        self._answered.set()

    @property
    def waiting_in_routers(self) -> float:
        """This worker's part of the rooms that wait there; 0 while the directory does not answer."""
        return 0.0 if self._is_unanswered() else self._waiting

    def is_from_directory(self, sender: str) -> bool:
        """Whether a message came from the directory that this worker has found."""
        return is_directory(sender, self._address)

    def replaces(self, answer: Replaced) -> bool:
        """Whether it is this process that was replaced."""
        return answer.nonce == self._nonce

    def on_load(self, load: WorkerLoad) -> None:
        """The record has this load from now on. Called on the engine loop; does not block."""
        if has_moved(self._announced, load):
            self._soon.set()

    def announce_soon(self) -> None:
        """Announce the record now, because something has changed that routers need at once (draining)."""
        if self._address is not None and self.incarnation:
            record = self._record()
            self._announced = record.load
            self._mailbox.send(self._address, Announce(record, self._nonce, self._settings))

    def stop(self, through: Mailbox | None = None) -> None:
        """Stop announcing and leave the directory, through another mailbox if the worker's may be broken."""
        self._stop.set()
        self._soon.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        if self._address is not None and self.incarnation:
            leave = Withdraw(self._worker, self.incarnation)
            (through or self._mailbox).send(self._address, leave)
            self._address = None  # a second call has nobody to tell

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._address is None or self._is_unanswered():
                self._find_directory()
            self._soon.clear()
            if not self.incarnation:
                self._join()
                continue
            self.announce_soon()
            self._stop.wait(min(_GAP_S, self._interval_s))
            self._soon.wait(max(0.0, self._interval_s - _GAP_S))

    @property
    def _interval_s(self) -> float:
        return min(self._longest_s, _SHARE * self._lease_s)

    def _is_unanswered(self) -> bool:
        return time.monotonic() - self._answered_at > 3 * self._interval_s

    def _join(self) -> None:
        """Ask for an incarnation. A directory that has just started may answer a later question."""
        if self._address is not None:
            self._mailbox.send(self._address, Join(self._worker, self._nonce))
        self._soon.wait(_JOIN_S)

    def _find_directory(self) -> None:
        try:
            address = self._resolve()
        except Exception as error:  # noqa: BLE001  whatever the resolver uses may fail while it restarts
            log.warning("the directory cannot be found, trying again: %s", error)
            return
        if address != self._address and self._address is not None:
            self._mailbox.forget(self._address)
        self._address = address
