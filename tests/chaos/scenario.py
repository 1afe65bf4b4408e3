"""One scenario: streams are brought into a state, a fault happens, and everything is counted."""

from __future__ import annotations

import time
from random import Random
from signal import SIGTERM

from tests.chaos.client import Client
from tests.chaos.judge import Judge, Outcome
from tests.chaos.matrix import Cell
from tests.chaos.observed import wait_until
from tests.chaos.play import Play
from tests.chaos.processes import Forked
from tests.chaos.questions import Questions, start_all
from tests.chaos.stack import ChaosStack
from tests.chaos.states import STATES

_REACH_S = 6.0
_STREAMS = 6
_STREAM_BOUND_S = 40.0
_SILENT_ROUTER_S = 3.0  # when a client leaves a router that was stopped
_PATIENCE_S = 30.0


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
        self._prefilled = 0

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
        victim = self._reach(clients)
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
        if self._moves_alone and not self.outcome.missed:
            recomputed = self._stack.prefilled() - self._prefilled
            if recomputed > 0:
                self.outcome.count("moved_recomputed_tokens", "of rooms that moved", recomputed)
        problem = play.end()
        if problem is not None:
            self.outcome.count("zombies", problem)
        judge = Judge(self._stack, self.outcome)
        judge.streams(clients, self._questions)
        judge.fault(play, clients)
        judge.settled()

    # -- into the state ------------------------------------------------------------------------

    def _ask(self) -> list[Client]:
        """The clients, not started yet; gates are set."""
        for worker in self._stack.workers:
            worker.observed.clear()
        for worker in self._stack.of_role("P"):
            worker.set_gates(self._state.hold_p, self._state.pace_p)
        for worker in self._stack.of_role("D"):
            held = self._state.hold_d if not self._moves_alone else frozenset[str]()
            worker.set_gates(held, self._state.pace_d)
        return [
            Client(question.asked, f"{self._name}-{i}", self._name, self._stack.routers)
            for i, question in enumerate(self._questions)
        ]

    def _patience(self) -> float:
        stopped = self.cell.role == "router" and self.cell.fault in ("stop", "thaw")
        return _SILENT_ROUTER_S if stopped else _PATIENCE_S

    @property
    def _moves_alone(self) -> bool:
        """Whether rooms move and nothing delays that: clients that leave do not. Then moves are measured."""
        return self.cell.state == "draining" and self.cell.role == "D" and self.cell.fault == "abort"

    def _reach(self, clients: list[Client]) -> Forked | None:
        """Wait until the state shows. The victim of the fault, or None when the state does not come."""
        state, found = self._state, list[Forked]()

        def reached() -> bool:
            found[:] = [one for one in self._stack.of_role(state.side) if state.reached(one.observed)]
            return bool(found)

        if not wait_until(reached, _REACH_S):
            return None
        own = found if self.cell.role == state.side else self._stack.of_role(self.cell.role)
        victim = own[0]
        if self._moves_alone:  # what is prefilled from now on is computed for the second time
            wait_until(lambda: all(client.decodes for client in clients), _REACH_S)
            self._prefilled = self._stack.prefilled()
        if state.name == "draining" and not self._drain(victim):
            return None
        return victim

    def _drain(self, victim: Forked) -> bool:
        """Tell the victim to leave. Whether it has begun to, with rooms still on it."""
        victim.send_signal(SIGTERM)
        if self.cell.role == "router":
            victim.observed.draining = True  # it has no gates that would report that
            return victim.alive
        return wait_until(lambda: victim.observed.draining, _REACH_S) and victim.alive

    def _open_gates(self) -> None:
        for worker in self._stack.workers:
            worker.set_gates(pace=self._state.pace_d if worker.name.startswith("D") else None)
