"""Members: the modelled workers of a run, and what the directory knows of them."""

from __future__ import annotations

import re

from msgspec.structs import replace

from router.directory.directory import Directory
from simulator.batch import ItlHistogram
from simulator.clock import Clock
from simulator.options import SimulationOptions
from simulator.worker import ModelledWorker, WorkerListener
from wire.messages.directory import Announce, View, Withdraw
from wire.records import GroupLayout, Role, WorkerLoad, WorkerRecord


class Members:
    """Workers join, report, crash, drain, leave and change their roles."""

    def __init__(
        self, clock: Clock, options: SimulationOptions, listener: WorkerListener, itl: ItlHistogram
    ) -> None:
        self.everyone: list[ModelledWorker] = []  # every life
        self._clock = clock
        self._options = options
        self._listener = listener
        self._itl = itl
        self._directory = Directory(options.lease_s)
        self._lives: dict[tuple[str, int], ModelledWorker] = {}  # by id and incarnation

    def begin(self) -> None:
        """The workers of the run's beginning join, and report one after another."""
        options = self._options
        for letter, role, count in (("p", Role.PREFILL, options.prefill), ("d", Role.DECODE, options.decode)):
            for number in range(count):
                worker = self._start(f"{letter}{number}", role, incarnation=1)
                self._directory.announce(Announce(worker.record), self._clock.now)
                self._clock.after(options.report_gap_s * (1 + number / count), self._report, worker)

    def worker(self, record: WorkerRecord) -> ModelledWorker:
        """The worker with this id and incarnation."""
        return self._lives[record.id, record.incarnation]

    def serving(self, role: Role) -> list[ModelledWorker]:
        """The workers of a role, those that drain included."""
        return [one for one in self.everyone if one.record.role is role and not one.dead]

    def view(self, routers: list[str]) -> View:
        """What the directory tells routers now."""
        self._directory.expire(self._clock.now)
        return View(0, self._directory.version, self._directory.records(), routers)

    def join(self, name: str, role: Role) -> None:
        """A new worker serves from now on."""
        self._report(self._start(name, role, incarnation=1))

    def crash(self, name: str, back_after_s: float) -> None:
        """The process of a worker dies, and another takes its place after a while."""
        for worker in [one for one in self.everyone if one.record.id == name and not one.dead]:
            for attempt, lacking in worker.crash():
                if not attempt.over:
                    attempt.request.forwarded += attempt.output - 1 - lacking
            self._clock.after(back_after_s, self._return, worker.record)

    def drain(self, worker: ModelledWorker) -> None:
        """Give it no new requests."""
        worker.record = replace(worker.record, draining=True)
        self._directory.announce(Announce(replace(worker.record, load=worker.load())), self._clock.now)

    def leave(self, worker: ModelledWorker) -> None:
        """A drained worker ends."""
        assert worker.memory.idle
        self._withdraw(worker)
        worker.crash()

    def switch(self, worker: ModelledWorker) -> None:
        """A drained worker begins a new incarnation in the other role. It keeps its cache, and says so."""
        assert worker.memory.idle
        self._withdraw(worker)
        old = worker.record
        role = Role.DECODE if old.role is Role.PREFILL else Role.PREFILL
        worker.record = replace(old, role=role, incarnation=old.incarnation + 1, draining=False)
        self._lives[old.id, old.incarnation + 1] = worker
        self._directory.announce(Announce(worker.record), self._clock.now)
        for medium, pages in worker.memory.pages().items():
            if pages:
                self._listener.stored(worker, list(pages), medium)

    def _withdraw(self, worker: ModelledWorker) -> None:
        self._directory.withdraw(Withdraw(worker.record.id, worker.record.incarnation))

    def _return(self, record: WorkerRecord) -> None:
        self._report(self._start(record.id, record.role, record.incarnation + 1))

    def _start(self, name: str, role: Role, incarnation: int) -> ModelledWorker:
        model = self._options.worker
        page_bytes = model.page_tokens * model.kv_bytes_per_token
        record = WorkerRecord(
            id=name, incarnation=incarnation, role=role, mailbox=name, events="", replay="", model="model",
            fingerprint="", groups=(
                GroupLayout("full", "full", (1,), "bfloat16", "plain", model.page_tokens, page_bytes),
            ),
            max_context_tokens=model.kv_tokens, total_tokens=model.kv_tokens,
            max_running_requests=model.max_running, pid=0, host=self._host(name), rack=self._rack(name),
            transfer_backends=(), host_tokens=model.host_tokens, peer_fetch=True,
        )  # fmt: skip
        worker = ModelledWorker(self._clock, record, model, self._listener, self._itl)
        self._lives[name, incarnation] = worker
        self.everyone.append(worker)
        return worker

    def _host(self, name: str) -> str:
        """Workers of both roles share it: p0 and d0, and with two of each role, p1 and d1, too."""
        each = self._options.workers_per_host
        return f"host{_number(name) // each}" if each else name

    def _rack(self, name: str) -> str:
        each = self._options.workers_per_host * self._options.hosts_per_rack
        return f"rack{_number(name) // each}" if each else ""

    def _report(
        self, worker: ModelledWorker, reported: WorkerLoad | None = None, renew_at: float = 0.0
    ) -> None:
        """The worker reports when its load has changed, and renews its lease when that is due.

        The product's workers also wait until then when their load has changed only a little.
        """
        if worker.dead:
            return
        now, load = self._clock.now, worker.load()
        if load != reported or now >= renew_at:
            self._directory.announce(Announce(replace(worker.record, load=load)), now)
            renew_at = now + self._options.report_interval_s
        self._clock.after(self._options.report_gap_s, self._report, worker, load, renew_at)


def _number(name: str) -> int:
    """What a worker's name ends with."""
    return int(re.split(r"\D", name)[-1])
