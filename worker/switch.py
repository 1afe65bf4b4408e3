"""SwitchingWorker: a worker process that changes its role while it runs.

    SetRole ─> drain ─> close the old Worker ─> open one in the other role ─> join the directory
                        (its sockets end)       (the same weights, pools and tree)

Each Worker is an incarnation with addresses of its own, so nothing that is late for the old role reaches the
new one. The tree stays: its first KV events are all that it holds, and prompts hit what the old role cached.
A change that fails makes the process unhealthy, and it is replaced.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping
from typing import Any

from common.errors import WorkerLost
from wire.records import Role, WorkerRecord
from worker.loop import Worker
from worker.options import WorkerOptions
from worker.parts import open_model
from worker.role import WorkerRole

log = logging.getLogger(__name__)


class SwitchingWorker:
    """One model, and one Worker at a time around it. Used like a Worker: `start`, `healthy`, `drain`,
    `close`."""

    def __init__(
        self,
        options: WorkerOptions,
        roles: Mapping[Role, type[WorkerRole[Any]]],
        first: Role,
        drain_s: float,
        resolve_directory: Callable[[], str] | None = None,
    ) -> None:
        """Load the model, for the role `first`. A change of role may drain for `drain_s` seconds. Raises
        ConfigError for options that cannot work."""
        name = options.worker_id or f"worker-{secrets.token_hex(3)}"
        self._options = options.model_copy(update={"worker_id": name})
        self._roles = roles
        self._drain_s = drain_s
        self._resolve_directory = resolve_directory
        self._model = open_model(self._options, any(kind.reserves for kind in roles.values()))
        try:
            self._worker = self._open(first)
        except BaseException:
            self._model.close()
            raise
        self._wanted = first
        self._change: threading.Thread | None = None
        self._lock = threading.Lock()  # held from the end of a drain until the next Worker has joined
        self._leaving = False
        self._failure: WorkerLost | None = None

    def start(self) -> WorkerRecord:
        """See Worker."""
        return self._worker.start()

    def record(self) -> WorkerRecord:
        """See Worker."""
        return self._worker.record()

    def healthy(self) -> None:
        """See Worker. Raises WorkerLost, too, when a change of role has failed."""
        if self._failure is not None:
            raise self._failure
        self._worker.healthy()

    def drain(self, bound_s: float) -> bool:
        """See Worker. There is no change of role from now on: one that drains ends with that, and one that
        has drained is waited for."""
        with self._lock:
            self._leaving = True
        return self._worker.drain(bound_s)

    def close(self) -> None:
        """See Worker."""
        with self._lock:
            self._leaving = True
        self._worker.close()
        if self._change is not None:
            self._change.join(timeout=5.0)  # its drain is over
        self._model.close()

    # -- the change --------------------------------------------------------------------------------

    def _open(self, role: Role) -> Worker:
        return Worker(
            self._options, self._roles[role], self._resolve_directory, self._model, self._begin_change
        )

    def _begin_change(self, role: Role) -> str:
        """The directory asks for a role that the present Worker does not have. On its engine loop."""
        if role not in self._roles or self._leaving or self._failure is not None:
            return f"it cannot become a {role} worker: it knows no such role, or is about to end"
        if self._change is not None and self._change.is_alive():
            return "" if role is self._wanted else f"it is about to become a {self._wanted} worker: ask later"
        self._wanted = role
        self._change = threading.Thread(target=self._run_change, args=(role,), name="role", daemon=True)
        self._change.start()
        return ""

    def _run_change(self, role: Role) -> None:
        try:
            self._take_role(role)
        except BaseException as error:
            log.exception("%s cannot become a %s worker", self._options.worker_id, role)
            self._failure = WorkerLost(f"{self._options.worker_id} cannot become a {role} worker: {error!r}")

    def _take_role(self, role: Role) -> None:
        """Raises what goes wrong. Does nothing after the drain when the worker is to leave instead."""
        old = self._worker
        drained = old.drain(self._drain_s)
        with self._lock:
            if self._leaving:
                return
            old.healthy()  # a loop that has failed counts as drained
            if not drained:
                raise WorkerLost(f"it was not empty after {self._drain_s:.0f} s")
            old.close()
            if old.running:
                raise WorkerLost("its engine loop does not end")
            self._worker = self._open(role)
            self._worker.start()
