"""RoleKeeper: which worker of a deployment with `roles: dynamic` has which role.

It gives a worker that starts its first role, and asks workers to change it: as the load wants it
(scaling/roles.py), or as an operator has said with `baton roles`. Pure: time is passed in, nothing is sent.
The directory's actor owns it, because the directory has every worker's record with its load.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.worker_ids import parse_worker_id
from scaling.demand import DecodeDemand, PrefillDemand
from scaling.load import worker_sample
from scaling.roles import RoleController
from wire.records import Role, WorkerRecord

log = logging.getLogger(__name__)

_START_S = 1800.0  # large models load slowly: a worker that has not joined by then has failed
_ASK_EVERY_S = 1.0
_SLACK_S = 60.0  # for a change, beyond its drain
_REPLACED_S = 60.0  # by then Serve has begun to start another worker in place of one that died


@dataclass(frozen=True)
class RolePlan:
    """What the configuration says of a deployment whose roles are dynamic. Not how many workers there are:
    routers know the plan, and Serve would restart them with every change of it."""

    ttft_s: float  # objective, p95
    itl_s: float  # likewise
    period_s: float  # between two decisions
    drain_s: float  # bound on the drain of a change


@dataclass(slots=True)
class _Change:
    role: Role
    until: float
    ask_at: float


class RoleKeeper:
    """Used by one thread at a time."""

    def __init__(self, deployment: str, plan: RolePlan) -> None:
        self._deployment = deployment
        self.automatic = True  # else the roles are as an operator has set them
        self._plan = plan
        memory_s = RoleController.MEMORY_S
        prefill, decode = PrefillDemand(plan.ttft_s, memory_s), DecodeDemand(plan.itl_s, memory_s)
        self._controller = RoleController(prefill, decode, plan.period_s)
        self._decide_at = 0.0
        self._had_decode = False
        self._prefill_at: float | None = None  # when a worker prefilled last, or was about to
        self._share = 1, 2  # of the workers that are to prefill: so many of so many
        self._starting: dict[str, tuple[Role, float]] = {}  # first roles, until when; by worker
        self._changes: dict[str, _Change] = {}
        self._records: dict[str, WorkerRecord] = {}

    # -- told by the directory ---------------------------------------------------------------------

    def first_role(self, worker: str, now: float) -> Role:
        """The role of a worker that starts. Asked again, the answer is the same."""
        known = self._starting.get(worker)
        if known is None:
            counts = self._counts()
            prefill, total = self._share
            few = counts[Role.PREFILL] * total < prefill * (sum(counts.values()) + 1)
            role = Role.PREFILL if few and counts[Role.DECODE] else Role.DECODE
            known = self._starting[worker] = (role, now + _START_S)
        return known[0]

    def tick(self, records: list[WorkerRecord], now: float) -> list[tuple[WorkerRecord, Role]]:
        """Take the live workers, of all deployments. Returns those that are to be asked to take a role."""
        self._records = {one.id: one for one in records if parse_worker_id(one.id)[0] == self._deployment}
        self._note(now)
        self._keep_decode(now)
        self._keep_prefill(now)
        if self.automatic and now >= self._decide_at:
            self._decide_at = now + self._plan.period_s
            self._decide(now)
        asked = []
        for worker, change in self._changes.items():
            record = self._records.get(worker)
            if record is not None and not record.draining and now >= change.ask_at:
                change.ask_at = now + _ASK_EVERY_S
                asked.append((record, change.role))
        return asked

    def _note(self, now: float) -> None:
        """Forget what is over."""
        for worker, (_, until) in list(self._starting.items()):
            if worker in self._records or now >= until:
                del self._starting[worker]
        for worker, change in list(self._changes.items()):
            record = self._records.get(worker)
            if record is not None and record.role is change.role and not record.draining:
                del self._changes[worker]
            elif now >= change.until:
                log.warning("%s has not become a %s worker", worker, change.role)
                del self._changes[worker]

    def _keep_decode(self, now: float) -> None:
        """When the last decode worker has died, a prefill worker takes its place in the time of a drain: the
        model's load in another process takes longer. Without prefill workers, decode workers do everything.
        """
        roles = [self._wanted(record) for record in self._staying()]
        self._had_decode = self._had_decode or Role.DECODE in roles
        gone = self._changes.keys() - self._records.keys()  # between two incarnations
        if self._had_decode and roles and Role.DECODE not in roles and not gone:
            idlest = min(self._staying(), key=self._cost)
            self._change({idlest.id: Role.DECODE}, now)

    def _keep_prefill(self, now: float) -> None:
        """When fewer workers are wanted, Serve may stop the last one that prefills, and start no other."""
        if self._prefill_at is None or self._counts()[Role.PREFILL] or len(self._staying()) < 2:
            self._prefill_at = now
        elif now - self._prefill_at >= _REPLACED_S:
            idlest = min(self._staying(), key=self._cost)
            self._change({idlest.id: Role.PREFILL}, now)

    def _decide(self, now: float) -> None:
        samples = {
            role: {one.id: worker_sample(one) for one in self._staying() if one.role is role} for role in Role
        }
        wanted = self._controller.switch(
            samples[Role.PREFILL], samples[Role.DECODE], self._changes.keys(), now
        )
        self._change(
            {
                **dict.fromkeys(wanted.to_prefill, Role.PREFILL),
                **dict.fromkeys(wanted.to_decode, Role.DECODE),
            },
            now,
        )

    # -- told by an operator -----------------------------------------------------------------------

    def set_roles(self, roles: Mapping[str, Role], now: float) -> str:
        """These workers take these roles, and nothing is automatic any more. Returns why not, or ""."""
        present = {record.id: self._wanted(record) for record in self._staying()}
        for worker in roles:
            if worker not in present:
                return f"there is no worker {worker}, or it is leaving"
        missing = set(Role) - {*({**present, **roles}).values()}
        if missing:
            return f"no {missing.pop()} worker would be left"
        self.automatic = False
        self._change({name: role for name, role in roles.items() if present[name] is not role}, now)
        self._keep_share()
        return ""

    def set_counts(self, prefill: int, decode: int, now: float) -> str:
        """So many workers in each role; the least loaded ones change. As `set_roles`."""
        present = sorted(self._staying(), key=self._cost)
        if min(prefill, decode) < 1 or prefill + decode != len(present):
            return f"{prefill} + {decode} are not {len(present)} workers, at least one in each role"
        by_role = {role: [one.id for one in present if self._wanted(one) is role] for role in Role}
        surplus = len(by_role[Role.PREFILL]) - prefill
        if surplus > 0:
            return self.set_roles(dict.fromkeys(by_role[Role.PREFILL][:surplus], Role.DECODE), now)
        return self.set_roles(dict.fromkeys(by_role[Role.DECODE][:-surplus], Role.PREFILL), now)

    def set_automatic(self) -> str:
        """Roles follow the load again. As `set_roles`."""
        if not self._records:
            return "no worker has joined yet: try again"  # nobody has told what was said before
        self.automatic = True
        return ""

    def set_by_operator(self) -> tuple[int, int]:
        """What an operator has set: so many prefill and decode workers; 0 and 0: nothing."""
        prefill, total = self._share
        return (0, 0) if self.automatic else (prefill, total - prefill)

    def follow(self, prefill: int, decode: int) -> None:
        """What an operator has set before this object was there, as `set_by_operator` says it."""
        self.automatic = not (prefill or decode)
        if not self.automatic:
            self._share = prefill, prefill + decode

    def wanted(self) -> dict[str, Role]:
        """The workers that are about to change their role."""
        return {worker: change.role for worker, change in self._changes.items()}

    # -- both --------------------------------------------------------------------------------------

    def _change(self, roles: Mapping[str, Role], now: float) -> None:
        for worker, role in roles.items():
            log.warning("%s is to become a %s worker", worker, role)
            self._changes[worker] = _Change(role, now + self._plan.drain_s + _SLACK_S, now)
        if roles:
            self._keep_share()

    def _keep_share(self) -> None:
        """Workers that start from now on keep it."""
        counts = self._counts()
        self._share = counts[Role.PREFILL], sum(counts.values())

    def _staying(self) -> list[WorkerRecord]:
        """Workers that are not leaving for good."""
        return [one for one in self._records.values() if not one.draining or one.id in self._changes]

    def _wanted(self, record: WorkerRecord) -> Role:
        change = self._changes.get(record.id)
        return record.role if change is None else change.role

    def _cost(self, record: WorkerRecord) -> tuple[bool, int, str]:
        """Orders workers by what a change costs. One that was not told of its last change yet stays."""
        requests = record.load.running_requests + record.load.waiting_requests
        return record.id not in self._changes or record.draining, requests, record.id

    def _counts(self) -> dict[Role, int]:
        """Workers by the role that they have or will have, those that start included."""
        roles = [self._wanted(record) for record in self._staying()]
        roles += [change.role for worker, change in self._changes.items() if worker not in self._records]
        roles += [role for role, _ in self._starting.values()]
        return {role: roles.count(role) for role in Role}
