"""Roles: who has which role in an application, for the directory's actor. Shared by its two threads.

The directory's thread has the workers' records and sends what is to be sent. Ray's thread answers workers
that start and `baton roles`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.role_keeper import WORKER, RoleKeeper, RolePlan
from router.directory.server import RoleOrders
from wire.records import Role, WorkerRecord
from wire.settings import NO_SETTINGS, DeploymentRoles, Settings


@dataclass(frozen=True)
class WorkerRoles:
    """An operator's wish: these workers take these roles."""

    roles: Mapping[str, Role]


@dataclass(frozen=True)
class RoleCounts:
    """An operator's wish: so many workers in each role."""

    prefill: int
    decode: int


@dataclass(frozen=True)
class AutomaticRoles:
    """An operator's wish: roles follow the load again."""


RoleWish = WorkerRoles | RoleCounts | AutomaticRoles


@dataclass(frozen=True)
class RoleRow:
    """One worker."""

    worker: str
    role: Role
    wanted: Role | None  # the role that it is about to take
    draining: bool
    running: int
    waiting: int
    queued_tokens: int  # of prompts
    since_s: float  # how long the directory has known it in this role


@dataclass(frozen=True)
class RoleTable:
    """All workers, and who decides: "fixed" (the configuration), "automatic" (the load) or "set" (an
    operator)."""

    decided: str
    rows: list[RoleRow]


class Roles:
    """Without a plan the roles are fixed: nothing is assigned, and only the table can be asked for."""

    def __init__(self, plan: RolePlan | None) -> None:
        self._plan = plan
        self._keeper = None if plan is None else RoleKeeper(plan)
        self._records: list[WorkerRecord] = []
        self._settings = NO_SETTINGS  # what the directory knows, and what operators have said since
        self._since: dict[tuple[str, int], float] = {}  # by worker and incarnation
        self._lock = threading.Lock()

    def assign(self, records: list[WorkerRecord], told: Settings, now: float) -> RoleOrders:
        """See AssignRoles. On the directory's thread."""
        with self._lock:
            self._records = records
            self._learn(told)
            self._since = {
                key: self._since.get(key, now) for key in ((one.id, one.incarnation) for one in records)
            }
            asked = [] if self._keeper is None else self._keeper.tick(records, now)
            return RoleOrders(asked, self._settings)

    def follow(self, plan: RolePlan | None) -> None:
        """The plan of a configuration that was deployed now. The same plan changes nothing."""
        with self._lock:
            if plan != self._plan:
                self._plan = plan
                self._keeper = None if plan is None else RoleKeeper(plan)
                self._follow_operator()

    def first(self, worker: str) -> Role | None:
        """See RoleKeeper.first_role. None while the roles are fixed: a worker may start before a router has
        told its plan."""
        with self._lock:
            return None if self._keeper is None else self._keeper.first_role(worker, time.monotonic())

    def table(self) -> RoleTable:
        """Who has which role now."""
        now = time.monotonic()
        with self._lock:
            keeper = self._keeper
            wanted = {} if keeper is None else keeper.wanted()
            workers = sorted(self._records, key=lambda one: (one.role is Role.DECODE, one.id))
            rows = [self._row(one, wanted.get(one.id), now) for one in workers]
        return RoleTable("fixed" if keeper is None else "automatic" if keeper.automatic else "set", rows)

    def _row(self, record: WorkerRecord, wanted: Role | None, now: float) -> RoleRow:
        load = record.load
        return RoleRow(
            record.id, record.role, wanted, record.draining, load.running_requests, load.waiting_requests,
            load.queued_prefill_tokens, now - self._since[record.id, record.incarnation],
        )  # fmt: skip

    def set(self, wish: RoleWish) -> str:
        """What an operator wants. Returns why not, or ""."""
        now = time.monotonic()
        with self._lock:
            keeper = self._keeper
            if keeper is None:
                return "the roles of this application are fixed"
            match wish:
                case WorkerRoles(roles):
                    problem = keeper.set_roles(roles, now)
                case RoleCounts(prefill, decode):
                    problem = keeper.set_counts(prefill, decode, now)
                case AutomaticRoles():
                    problem = keeper.set_automatic()
            if not problem:
                known = self._settings.roles.get(WORKER)
                revision = 1 if known is None else known.revision + 1
                said = DeploymentRoles(revision, *keeper.set_by_operator())
                self._settings = self._settings.with_told(Settings(roles={WORKER: said}))
            return problem

    def _learn(self, told: Settings) -> None:
        """A directory before this one may have been told what this one was not."""
        before, self._settings = self._settings.roles, self._settings.with_told(told)
        if self._settings.roles.get(WORKER) is not before.get(WORKER):
            self._follow_operator()

    def _follow_operator(self) -> None:
        said = self._settings.roles.get(WORKER)
        if self._keeper is not None and said is not None:
            self._keeper.follow(said.prefill, said.decode)
