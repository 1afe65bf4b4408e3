"""One scenario: streams are brought into a state, a fault happens, and everything is counted."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from signal import SIGTERM
from typing import Any

from tests.chaos.asked import difference
from tests.chaos.client import Client, Streamed
from tests.chaos.matrix import Cell
from tests.chaos.observed import wait_until
from tests.chaos.play import Play
from tests.chaos.processes import Forked
from tests.chaos.questions import Question, Questions, start_all
from tests.chaos.stack import ChaosStack
from tests.chaos.states import STATES

_REACH_S = 6.0
_STREAMS = 6
_STREAM_BOUND_S = 40.0
_SETTLE_S = 20.0
_SILENT_ROUTER_S = 3.0  # when a client leaves a router that was stopped
_PATIENCE_S = 30.0


@dataclass
class Outcome:
    """What was counted in a scenario."""

    cell: Cell
    missed: bool = False
    counts: Counter[str] = field(default_factory=Counter)  # lost, doubled, wrong_token, ...
    detect_s: list[float] = field(default_factory=list)
    resume_s: list[float] = field(default_factory=list)
    move_gap_ms: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    took_s: float = 0.0

    def count(self, what: str, why: str, times: int = 1) -> None:
        """Something that should not have happened."""
        self.counts[what] += times
        self.problems.append(f"{what}: {why}")


class Scenario:
    """Plays one cell on a warm stack."""

    def __init__(self, cell: Cell, number: int, seed: int, stack: ChaosStack, questions: Questions) -> None:
        self.cell = cell
        self.outcome = Outcome(cell)
        self._state = STATES[cell.state]
        self._name = f"s{seed}-{number}"
        self._rng = Random(f"{seed}/{cell}")
        self._stack = stack
        drawn = questions.long if self._state.long_prompts else questions.short
        count = len(drawn) if self._state.long_prompts else _STREAMS
        self._questions = self._rng.sample(drawn, count)

    def run(self) -> Outcome:
        """Play the cell and put the stack right again."""
        begun = time.monotonic()
        try:
            self._play()
        finally:
            self.outcome.took_s = time.monotonic() - begun
        return self.outcome

    def _play(self) -> None:
        clients = self._ask()
        threads = start_all(clients, _STREAM_BOUND_S, self._patience())
        victim = self._reach()
        play = None
        if victim is None:
            self.outcome.missed = True
            self._open_gates()
        else:
            play = Play(self.cell.fault, self._stack, victim, self._rng)
            play.begin(clients)
            self._open_gates()
            play.go_on()
        for thread in threads:
            thread.join()
        if play is None:
            play = Play("none", self._stack, self._stack.running["router/0"], self._rng)
        problem = play.end()
        if problem is not None:
            self.outcome.count("zombies", problem)
        self._judge(clients, play)
        self._settle()

    # -- into the state ------------------------------------------------------------------------

    def _ask(self) -> list[Client]:
        """The clients, not started yet; gates are set."""
        for worker in self._stack.workers:
            worker.observed.clear()
        for worker in self._stack.of_role("P"):
            worker.set_gates(self._state.hold_p, self._state.pace_p)
        for worker in self._stack.of_role("D"):
            worker.set_gates(self._state.hold_d, self._state.pace_d)
        return [
            Client(question.asked, f"{self._name}-{i}", self._name, self._stack.routers)
            for i, question in enumerate(self._questions)
        ]

    def _patience(self) -> float:
        stopped = self.cell.role == "router" and self.cell.fault in ("stop", "thaw")
        return _SILENT_ROUTER_S if stopped else _PATIENCE_S

    def _reach(self) -> Forked | None:
        """Wait until the state shows. The victim of the fault, or None when the state does not come."""
        state, found = self._state, list[Forked]()

        def reached() -> bool:
            found[:] = [one for one in self._stack.of_role(state.side) if state.reached(one.observed)]
            return bool(found)

        if not wait_until(reached, _REACH_S):
            return None
        own = found if self.cell.role == state.side else self._stack.of_role(self.cell.role)
        victim = own[0]
        if state.name == "draining" and not self._drain(victim):
            return None
        return victim

    def _drain(self, victim: Forked) -> bool:
        """Tell the victim to leave. Whether it has begun to, with rooms still on it."""
        victim.send_signal(SIGTERM)
        if self.cell.role == "router":
            return victim.alive
        return wait_until(lambda: victim.observed.draining, _REACH_S) and victim.alive

    def _open_gates(self) -> None:
        for worker in self._stack.workers:
            worker.set_gates(pace=self._state.pace_d if worker.name.startswith("D") else None)

    # -- what came of it -----------------------------------------------------------------------

    def _judge(self, clients: list[Client], play: Play) -> None:
        for client, question in zip(clients, self._questions, strict=True):
            if not client.leave.is_set():
                self._judge_stream(client.streamed, question)
        suspicions = self._suspicions(play.began_unix)
        faulted = {self._base(worker) for worker in play.faulted}
        began: list[float] = []
        for row in suspicions:
            if self._base(row["worker"]) in faulted:
                began.append(row["at_unix"])
            else:
                self.outcome.count("misblamed", f"{row['worker']} was suspected: {row['cause']}")
        if began and self.cell.fault in ("kill", "stop", "thaw", "partition router-worker"):
            self.outcome.detect_s.append(min(began) - play.began_unix)
            suspected = play.began + (min(began) - play.began_unix)
            for client in clients:
                self._judge_resume(client.streamed, suspected)
        if self.cell.state == "draining" and self.cell.role == "D" and self.cell.fault == "abort":
            gaps = [gap for client in clients for gap in client.streamed.gaps(play.began)]
            self.outcome.move_gap_ms += [max(gaps) * 1e3] if gaps else []

    def _judge_stream(self, streamed: Streamed, question: Question) -> None:
        who = f"{streamed.request_id} ({question.asked.kind})"
        if streamed.contradicted:
            self.outcome.count("wrong_token", f"{who}: an event takes tokens back")
        if not streamed.complete:
            self.outcome.count("lost", f"{who}: {streamed.problem}")
            return
        wrong = difference(question.asked, streamed.answer, question.answer)
        if wrong is not None:
            self.outcome.count(wrong, who)

    def _judge_resume(self, streamed: Streamed, suspected: float) -> None:
        """A stream that was started again on another worker: when did its next token come?"""
        after = streamed.first_after(suspected)
        trace = self._stack.debug(f"trace/{streamed.request_id}")
        placements = trace["otherData"]["placements"] if trace is not None else []
        if after is not None and any(placed["epoch"] > 0 for placed in placements):
            self.outcome.resume_s.append(after - suspected)

    def _suspicions(self, since_unix: float) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for router in range(len(self._stack.of_role("router"))):
            page = self._stack.debug("suspicions", router) or {"suspicions": []}
            rows += [row for row in page["suspicions"] if row["at_unix"] >= since_unix > 0]
        return rows

    def _base(self, worker: str) -> str:
        """The slot in a worker id: a replacement may have an id of its own."""
        return worker.partition("-")[0]

    def _settle(self) -> None:
        """Nothing is held by anybody: pages, rows, rooms."""
        deadline = time.monotonic() + _SETTLE_S
        while held := self._stack.held():
            if time.monotonic() > deadline:
                self.outcome.count("leaked_pages", str(held), len(held))
                return
