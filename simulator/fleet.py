"""ScaledFleet: how many workers there are during a run, and in which roles.

The decisions are the product's (scaling/). What Ray Serve adds to them is modelled here: a worker serves
`start_s` after it was asked for, a worker that leaves finishes its requests first, and Serve's delays.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from msgspec.structs import replace

from scaling.demand import DecodeDemand, Demand, PrefillDemand
from scaling.load import worker_sample
from scaling.objective import ObjectiveScaler
from scaling.roles import RoleController
from scaling.sample import WorkerSample
from simulator.clock import Clock
from simulator.members import Members
from simulator.options import Autoscale, SimulationOptions
from simulator.serve_policy import ServeLoadPolicy
from simulator.worker import ModelledWorker
from wire.records import Role

_POLL_S = 0.5  # between two looks at workers that drain; longer than a View takes to reach a router


class FleetSize(NamedTuple):
    """Workers that are paid for: those that start, serve or drain."""

    at_s: float
    prefill: int
    decode: int


class _Drain(NamedTuple):
    worker: ModelledWorker
    since: float
    then: Callable[[ModelledWorker], None]


class ScaledFleet:
    """Asks the policies every period, and carries out what they say."""

    def __init__(
        self,
        clock: Clock,
        options: SimulationOptions,
        members: Members,
        needed: Callable[[ModelledWorker], bool],
    ) -> None:
        """`needed` says whether a router has a request that cannot go on without the worker."""
        self.sizes: list[FleetSize] = []  # after each change
        self._clock = clock
        self._options = options
        self._members = members
        self._needed = needed
        self._numbers = count()
        self._starting = dict.fromkeys(Role, 0)
        self._draining: list[_Drain] = []
        self._switching: set[str] = set()
        self._load = {role: ServeLoadPolicy(options.scaling) for role in Role}
        self._slo = {
            Role.PREFILL: self._scaler(PrefillDemand(options.slo_ttft_s)),
            Role.DECODE: self._scaler(DecodeDemand(options.slo_itl_s)),
        }
        self._roles = self._role_controller()

    def begin(self) -> None:
        """The run begins."""
        scaling = self._options.scaling
        self._note()
        if scaling.policy is not Autoscale.FIXED or scaling.switch_roles:
            self._decide()
            self._finish_drains()

    def end(self) -> None:
        """The last request is over."""
        self._note()

    def worker_hours(self) -> float:
        """Of the whole run."""
        pairs = zip(self.sizes, self.sizes[1:], strict=False)
        return sum((after.at_s - size.at_s) * (size.prefill + size.decode) for size, after in pairs) / 3600

    # -- decisions -----------------------------------------------------------------------------------

    def _role_controller(self) -> RoleController:
        ttft_s, itl_s = self._options.slo_ttft_s, self._options.slo_itl_s
        period_s, memory_s = self._options.scaling.period_s, RoleController.MEMORY_S
        return RoleController(PrefillDemand(ttft_s, memory_s), DecodeDemand(itl_s, memory_s), period_s)

    def _scaler(self, demand: Demand) -> ObjectiveScaler:
        scaling = self._options.scaling
        return ObjectiveScaler(demand, scaling.start_s, scaling.hold_s)

    def _decide(self) -> None:
        if self._options.scaling.switch_roles:
            self._switch_roles()
        else:
            for role in Role:
                self._scale(role)
        self._clock.after(self._options.scaling.period_s, self._decide)

    def _scale(self, role: Role) -> None:
        staying = self._staying(role)
        current = len(staying) + self._starting[role]
        if not current:  # colocated: no worker of this role was asked for
            return
        if self._options.scaling.policy is Autoscale.LOAD:
            records = [one.record for one in staying]
            loads = {one.record.id: one.load() for one in staying}
            wanted = self._load[role].target(records, loads, self._clock.now, current)
        else:
            wanted = self._slo[role].target(self._samples(role), self._clock.now, current)
        wanted = min(wanted, self._options.scaling.most)
        for _ in range(current, wanted):
            self._starting[role] += 1
            self._note()
            self._clock.after(self._options.scaling.start_s, self._join, role)
        idlest = sorted(staying, key=lambda one: (one.load().running_requests, one.record.id))
        for worker in idlest[: max(0, min(current - wanted, len(staying) - 1))]:
            self._drain(worker, self._members.leave)

    def _switch_roles(self) -> None:
        prefill, decode = self._samples(Role.PREFILL), self._samples(Role.DECODE)
        wanted = self._roles.switch(prefill, decode, self._switching, self._clock.now)
        names = {*wanted.to_prefill, *wanted.to_decode}
        for worker in [one for role in Role for one in self._members.serving(role) if one.record.id in names]:
            self._switching.add(worker.record.id)
            self._drain(worker, self._switch_later)

    def _samples(self, role: Role) -> dict[str, WorkerSample]:
        return {one.record.id: _sample(one, self._clock.now) for one in self._members.serving(role)}

    # -- what follows --------------------------------------------------------------------------------

    def _staying(self, role: Role) -> list[ModelledWorker]:
        return [one for one in self._members.serving(role) if not one.record.draining]

    def _join(self, role: Role) -> None:
        self._starting[role] -= 1
        self._members.join(f"{role}+{next(self._numbers)}", role)

    def _drain(self, worker: ModelledWorker, then: Callable[[ModelledWorker], None]) -> None:
        self._members.drain(worker)
        self._draining.append(_Drain(worker, self._clock.now, then))

    def _finish_drains(self) -> None:
        """Look at workers whose drain all routers know: until then requests may be on their way to them."""
        for one in [one for one in self._draining if one.worker.dead]:  # another takes its place
            self._draining.remove(one)
            self._switching.discard(one.worker.record.id)
        told = [one for one in self._draining if one.since + _POLL_S <= self._clock.now]
        over = [one for one in told if self._drained(one.worker)]
        for one in over:
            self._draining.remove(one)
            one.then(one.worker)
        if over:
            self._note()
        self._clock.after(_POLL_S, self._finish_drains)

    def _drained(self, worker: ModelledWorker) -> bool:
        load = worker.load()
        busy = load.running_requests or load.waiting_requests or not worker.memory.idle
        return not busy and not self._needed(worker)

    def _switch_later(self, worker: ModelledWorker) -> None:
        self._clock.after(self._options.scaling.switch_s, self._switch, worker)

    def _switch(self, worker: ModelledWorker) -> None:
        self._switching.remove(worker.record.id)
        if not worker.dead:
            self._members.switch(worker)
        self._note()

    def _note(self) -> None:
        counts = [len(self._members.serving(role)) + self._starting[role] for role in Role]
        self.sizes.append(FleetSize(self._clock.now, *counts))


def _sample(worker: ModelledWorker, now: float) -> WorkerSample:
    totals = {"prompts": worker.prompts, "prefilled_tokens": worker.prefilled_tokens}
    load = replace(worker.load(), **totals, decoded_tokens=worker.batch.made(worker.run, now))
    return worker_sample(replace(worker.record, load=load))
