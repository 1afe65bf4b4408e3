"""Simulation: a trace replayed in virtual time. Composes routers, directory and modelled workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from router.directory.directory import Directory
from simulator.batch import ItlHistogram
from simulator.clock import Clock
from simulator.frontend import Frontend
from simulator.options import SimulationOptions
from simulator.request import Attempt, Request, TraceRequest
from simulator.worker import ModelledWorker
from wire.messages import Announce, AssignedLoads, View
from wire.records import GroupLayout, Role, WorkerLoad, WorkerRecord

_PROGRESS_EVERY = 0.05


class Restart(NamedTuple):
    """A worker's process dies, and another takes its place."""

    at_s: float
    worker: str
    back_after_s: float


@dataclass(frozen=True, slots=True)
class Trace:
    """What happens: requests in the order of their arrival, and what goes wrong meanwhile."""

    name: str
    requests: Sequence[TraceRequest]
    restarts: Sequence[Restart] = field(default_factory=tuple)


class Simulation:
    """One run. `requests` say afterwards what became of each."""

    def __init__(self, trace: Trace, options: SimulationOptions) -> None:
        self.clock = Clock()
        self.gaps = ItlHistogram()
        self.requests: list[Request] = []
        self.all_workers: list[ModelledWorker] = []  # every life
        self._trace = trace
        self.options = options
        self._open = len(trace.requests)
        self._lives: dict[tuple[str, int], ModelledWorker] = {}
        self._directory = Directory(options.lease_s, started_at_ms=0)
        self.routers = [Frontend(self.clock, options, number, self) for number in range(options.routers)]

    def run(self, progress: Callable[[float], None] = lambda _share: None) -> None:
        """To the last request's end. `progress` is told the share of requests that are over."""
        options, clock = self.options, self.clock
        names = [("p", Role.PREFILL, options.prefill), ("d", Role.DECODE, options.decode)]
        for letter, role, count in names:
            for number in range(count):
                worker = self._start(f"{letter}{number}", role, incarnation=1)
                self._directory.announce(Announce(worker.record), clock.now)
                clock.after(options.report_gap_s * (1 + number / count), self._announce, worker)
        self._views()
        for number, one in enumerate(self._trace.requests):
            clock.at(one.at_s / options.speed, self._arrive, number, one)
        for restart in self._trace.restarts:
            clock.at(restart.at_s / options.speed, self._crash, restart)
        total = max(1, self._open)
        while self._open:
            goal = max(0, self._open - max(1, int(total * _PROGRESS_EVERY)))
            clock.run(lambda goal=goal: self._open <= goal)  # type: ignore[misc]
            progress(1 - self._open / total)
        self._settle()

    # -- FrontendHost --------------------------------------------------------------------------------

    def worker(self, record: WorkerRecord) -> ModelledWorker:
        """See FrontendHost."""
        return self._lives[record.id, record.incarnation]

    def send(self, sender: str, to: str, message: AssignedLoads) -> None:
        """See FrontendHost."""
        receiver = next(router for router in self.routers if router.address == to)
        self.clock.after(self.options.message_s, self._tell, receiver, sender, message)

    def ended(self, request: Request) -> None:
        """See FrontendHost."""
        assert not request.ended
        request.ended = True
        self._open -= 1

    # -- WorkerListener ------------------------------------------------------------------------------

    def first_token(self, one: Attempt) -> None:
        """See WorkerListener."""
        self.clock.after(self.options.message_s, self._router(one).first_token, one)

    def reserved(self, one: Attempt) -> None:
        """See WorkerListener. The router and P are told."""
        self.clock.after(self.options.message_s, self._router(one).reserved, one)
        if one.prefill is not None:
            self.clock.after(self.options.message_s, one.prefill.target, one)

    def done(self, one: Attempt) -> None:
        """See WorkerListener."""
        self.clock.after(self.options.message_s, self._router(one).done, one)

    def stored(self, worker: ModelledWorker, pages: list[int]) -> None:
        """See WorkerListener."""
        self._publish(worker, True, pages)

    def removed(self, worker: ModelledWorker, pages: list[int]) -> None:
        """See WorkerListener."""
        self._publish(worker, False, pages)

    # -- what happens --------------------------------------------------------------------------------

    def _router(self, one: Attempt) -> Frontend:
        return self.routers[one.request.number % len(self.routers)]

    def _tell(self, receiver: Frontend, sender: str, message: AssignedLoads) -> None:
        receiver.peers.take(sender, message, self.clock.now)

    def _arrive(self, number: int, one: TraceRequest) -> None:
        request = Request(number, one, self.clock.now)
        self.requests.append(request)
        if one.prompt_tokens + one.output_tokens > self.options.worker.kv_tokens:
            request.rejected = True
            self.ended(request)
        else:
            self.routers[number % len(self.routers)].arrive(request)

    def _publish(self, worker: ModelledWorker, stored: bool, pages: list[int]) -> None:
        if self.options.events:
            for router in self.routers:
                self.clock.after(self.options.event_delay_s, router.event, worker.record, stored, pages)

    def _start(self, name: str, role: Role, incarnation: int) -> ModelledWorker:
        model = self.options.worker
        page_bytes = model.page_tokens * model.kv_bytes_per_token
        record = WorkerRecord(
            id=name, incarnation=incarnation, role=role, mailbox=name, events="", replay="", model="model",
            fingerprint="", groups=(
                GroupLayout("full", "full", (1,), "bfloat16", "plain", model.page_tokens, page_bytes),
            ),
            max_context_tokens=model.kv_tokens, total_tokens=model.kv_tokens,
            max_running_requests=model.max_running, pid=0, host=name, transfer_backends=(),
        )  # fmt: skip
        worker = ModelledWorker(self.clock, record, model, self, self.gaps)
        self._lives[name, incarnation] = worker
        self.all_workers.append(worker)
        return worker

    def _announce(
        self, worker: ModelledWorker, said: WorkerLoad | None = None, renew_at: float = 0.0
    ) -> None:
        """It reports when its load has moved, and renews its lease when that is due. The product's workers
        also keep a small movement to themselves until then."""
        if worker.dead:
            return
        now, record = self.clock.now, worker.reported()
        if record.load != said or now >= renew_at:
            self._directory.announce(Announce(record), now)
            renew_at = now + self.options.report_interval_s
        self.clock.after(self.options.report_gap_s, self._announce, worker, record.load, renew_at)

    def _views(self) -> None:
        self._directory.expire(self.clock.now)
        view = self._directory.view()
        view = View(view.version, view.records, [router.address for router in self.routers])
        for router in self.routers:
            router.view(view)
            router.tick()
        self.clock.after(self.options.view_interval_s, self._views)

    def _crash(self, restart: Restart) -> None:
        lives = [one for one in self.all_workers if one.record.id == restart.worker and not one.dead]
        for worker in lives:
            for one, lacking in worker.crash():
                if not one.over:
                    one.request.forwarded += one.output - 1 - lacking
            self.clock.after(restart.back_after_s, self._return, worker.record)

    def _return(self, record: WorkerRecord) -> None:
        self._announce(self._start(record.id, record.role, record.incarnation + 1))

    def _settle(self) -> None:
        """Let what is under way arrive, so that memory and index can be compared."""
        end = self.clock.now + 2.0 + self.options.event_delay_s
        self.clock.at(end, lambda: None)
        self.clock.run(lambda: self.clock.now >= end)
