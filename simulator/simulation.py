"""Simulation: replays a trace in virtual time. Composes routers, directory and modelled workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from simulator.attempt import Attempt
from simulator.batch import ItlHistogram
from simulator.clock import Clock
from simulator.fleet import ScaledFleet
from simulator.frontend import Frontend, PagesMoved
from simulator.members import Members
from simulator.options import SimulationOptions
from simulator.request import Request, TraceRequest
from simulator.tenants import PageNames
from simulator.worker import ModelledWorker
from wire.messages.routers import AssignedLoads
from wire.records import WorkerRecord

_PROGRESS_EVERY = 0.05


class Restart(NamedTuple):
    """A worker's process dies, and another takes its place after a while."""

    at_s: float
    worker: str
    back_after_s: float


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival, and the restarts of workers."""

    name: str
    requests: Sequence[TraceRequest]
    restarts: Sequence[Restart] = field(default_factory=tuple)


class Simulation:
    """One run. Afterwards `requests` has the outcome of each request."""

    def __init__(self, trace: Trace, options: SimulationOptions) -> None:
        self.clock = Clock()
        self.itl = ItlHistogram()
        self.requests: list[Request] = []
        self._trace = trace
        self.options = options
        self._open = len(trace.requests)
        self._names = PageNames(options.sharing_min_tenants, options.sharing_epoch_s)
        self.members = Members(self.clock, options, self, self.itl)
        self.fleet = ScaledFleet(self.clock, options, self.members, self._needed)
        self.routers = [Frontend(self.clock, options, number, self) for number in range(options.routers)]

    def run(self, progress: Callable[[float], None] = lambda _share: None) -> None:
        """Run until the last request ends. `progress` is called with the share of requests that are over."""
        options, clock = self.options, self.clock
        self.members.begin()
        self._views()
        self.fleet.begin()
        for number, one in enumerate(self._trace.requests):
            clock.at(one.at_s / options.speed, self._arrive, number, one)
        for restart in self._trace.restarts:
            clock.at(restart.at_s / options.speed, self.members.crash, restart.worker, restart.back_after_s)
        total = max(1, self._open)
        while self._open:
            goal = max(0, self._open - max(1, int(total * _PROGRESS_EVERY)))
            clock.run(lambda goal=goal: self._open <= goal)  # type: ignore[misc]
            progress(1 - self._open / total)
        self.fleet.end()
        self._settle()

    # -- FrontendHost --------------------------------------------------------------------------------

    def worker(self, record: WorkerRecord) -> ModelledWorker:
        return self.members.worker(record)

    def send(self, sender: str, to: str, message: AssignedLoads) -> None:
        receiver = next(router for router in self.routers if router.address == to)
        self.clock.after(self.options.message_s, self._tell, receiver, sender, message)

    def ended(self, request: Request) -> None:
        assert not request.ended
        request.ended = True
        self._open -= 1

    # -- WorkerListener ------------------------------------------------------------------------------

    def first_token(self, attempt: Attempt) -> None:
        self.clock.after(self.options.message_s, self._router(attempt).first_token, attempt)
        if attempt.output == 1 and not attempt.alone:  # D is not needed
            attempt.end()
            self.worker(attempt.placement.decode).abort(attempt)

    def reserved(self, attempt: Attempt) -> None:
        self.clock.after(self.options.message_s, self._router(attempt).reserved, attempt)
        placement = attempt.placement
        if placement.prefill is not None:
            prefill, decode = self.worker(placement.prefill), self.worker(placement.decode)
            self.clock.after(self.options.message_s, prefill.target, attempt, decode)

    def transferred(self, attempt: Attempt) -> None:
        if self.options.workers_per_host:
            self.clock.after(self.options.message_s, self._router(attempt).transferred, attempt)

    def done(self, attempt: Attempt) -> None:
        self.clock.after(self.options.message_s, self._router(attempt).done, attempt)

    def stored(self, worker: ModelledWorker, pages: list[int], medium: str) -> None:
        self._publish(worker, PagesMoved(True, pages, medium))

    def removed(self, worker: ModelledWorker, pages: list[int], medium: str) -> None:
        self._publish(worker, PagesMoved(False, pages, medium))

    # -- what happens --------------------------------------------------------------------------------

    def _router(self, attempt: Attempt) -> Frontend:
        return self.routers[attempt.request.number % len(self.routers)]

    def _tell(self, receiver: Frontend, sender: str, message: AssignedLoads) -> None:
        receiver.peers.take(sender, message, self.clock.now)

    def _arrive(self, number: int, trace: TraceRequest) -> None:
        if not self.options.ignore_tenants:
            trace = replace(trace, hashes=self._names.of(trace.tenant, trace.hashes, self.clock.now))
        request = Request(number, trace, self.clock.now)
        self.requests.append(request)
        if trace.prompt_tokens + trace.output_tokens > self.options.worker.kv_tokens:
            request.rejected = True
            self.ended(request)
        else:
            self.routers[number % len(self.routers)].arrive(request)

    def _publish(self, worker: ModelledWorker, moved: PagesMoved) -> None:
        if self.options.events:
            for router in self.routers:
                self.clock.after(self.options.event_delay_s, router.event, worker.record, moved)

    def _needed(self, worker: ModelledWorker) -> bool:
        return any(router.needs(worker.record) for router in self.routers)

    def _views(self) -> None:
        view = self.members.view([router.address for router in self.routers])
        for router in self.routers:
            router.view(view)
            router.tick()
        self.clock.after(self.options.view_interval_s, self._views)

    def _settle(self) -> None:
        """Let messages arrive, so that memory and index can be compared."""
        end = self.clock.now + 2.0 + self.options.event_delay_s
        self.clock.at(end, lambda: None)
        self.clock.run(lambda: self.clock.now >= end)
