"""Roles: who has which role in an application, for the directory's actor. Shared by its two threads.

The directory's thread has the workers' records and sends what is to be sent. Ray's thread answers workers
that start and `baton roles`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.role_keeper import RoleKeeper, RolePlan
from cluster.worker_ids import parse_worker_id
from router.directory.server import RoleOrders
from wire.records import Role, WorkerRecord
from wire.settings import NO_SETTINGS, DeploymentRoles, Settings


@dataclass(frozen=True)
class WorkerRoles:
    """An operator's wish: these workers, of one deployment, take these roles."""

    roles: Mapping[str, Role]


@dataclass(frozen=True)
class RoleCounts:
    """An operator's wish: so many workers in each role, of a deployment; None: of the only one."""

    prefill: int
    decode: int
    deployment: str | None = None


@dataclass(frozen=True)
class AutomaticRoles:
    """An operator's wish: roles follow the load again, in a deployment; None: in all."""

    deployment: str | None = None


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
    """All workers, and who decides, by deployment: "automatic" (the load) or "set" (an operator). Those that
    are not in it have fixed roles."""

    decided: dict[str, str]
    rows: list[RoleRow]


class Roles:
    """Each deployment with a plan has roles that change, for itself. Others are only shown."""

    def __init__(self, plans: Mapping[str, RolePlan]) -> None:
        """`plans` by deployment."""
        self._plans = plans
        self._keepers = {name: RoleKeeper(name, plan) for name, plan in plans.items()}
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
            asked = [order for keeper in self._keepers.values() for order in keeper.tick(records, now)]
            return RoleOrders(asked, self._settings)

    def follow(self, plans: Mapping[str, RolePlan]) -> None:
        """The plans of a configuration that was deployed now. The same plan changes nothing."""
        with self._lock:
            keepers, self._keepers = self._keepers, {}
            for name, plan in plans.items():
                if plan == self._plans.get(name):
                    self._keepers[name] = keepers[name]
                else:
                    self._keepers[name] = RoleKeeper(name, plan)
                    self._follow_operator(name)
            self._plans = plans

    def first(self, worker: str) -> Role | None:
        """See RoleKeeper.first_role. None while the roles are fixed: a worker may start before a router has
        told its plan."""
        with self._lock:
            keeper = self._keepers.get(parse_worker_id(worker)[0])
            return None if keeper is None else keeper.first_role(worker, time.monotonic())

    def table(self) -> RoleTable:
        """Who has which role now."""
        now = time.monotonic()
        with self._lock:
            wanted = {worker: role for one in self._keepers.values() for worker, role in one.wanted().items()}
            decided = {
                name: "automatic" if keeper.automatic else "set" for name, keeper in self._keepers.items()
            }
            workers = sorted(self._records, key=lambda one: (one.role is Role.DECODE, one.id))
            rows = [self._row(one, wanted.get(one.id), now) for one in workers]
        return RoleTable(decided, rows)

    def _row(self, record: WorkerRecord, wanted: Role | None, now: float) -> RoleRow:
        load = record.load
        return RoleRow(
            record.id, record.role, wanted, record.draining, load.running_requests, load.waiting_requests,
            load.queued_prefill_tokens, now - self._since[record.id, record.incarnation],
        )  # fmt: skip

    def set(self, wish: RoleWish) -> str:
        """What an operator wants. Returns why not, or ""."""
        with self._lock:
            if not self._keepers:
                return "the roles of this application are fixed"
            named = self._named(wish)
            for name in named:
                if name not in self._keepers:
                    return f"the roles of {name or 'this worker'} are fixed, or it is not there"
            if len(named) != 1 and not isinstance(wish, AutomaticRoles):
                return f"name one deployment; there are {', '.join(self._keepers)}"
            problems = [self._set(name, wish) for name in named]
            return next(filter(None, problems), "")

    def _named(self, wish: RoleWish) -> list[str]:
        """The deployments that are meant."""
        if isinstance(wish, WorkerRoles):
            return sorted({parse_worker_id(worker)[0] for worker in wish.roles})
        return list(self._keepers) if wish.deployment is None else [wish.deployment]

    def _set(self, name: str, wish: RoleWish) -> str:
        keeper, now = self._keepers[name], time.monotonic()
        match wish:
            case WorkerRoles(roles):
                problem = keeper.set_roles(roles, now)
            case RoleCounts(prefill, decode):
                problem = keeper.set_counts(prefill, decode, now)
            case AutomaticRoles():
                problem = keeper.set_automatic()
        if not problem:
            known = self._settings.roles.get(name)
            revision = 1 if known is None else known.revision + 1
            said = DeploymentRoles(revision, *keeper.set_by_operator())
            self._settings = self._settings.with_told(Settings(roles={name: said}))
        return problem

    def _learn(self, told: Settings) -> None:
        """A directory before this one may have been told what this one was not."""
        self._settings = self._settings.with_told(told)
        for name in self._keepers:
            self._follow_operator(name)

    def _follow_operator(self, name: str) -> None:
        said = self._settings.roles.get(name)
        if said is not None:
            self._keepers[name].follow(said.prefill, said.decode)
