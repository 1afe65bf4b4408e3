"""Judge: counts what a fault has done to streams, workers and their memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.asked import difference
from tests.chaos.client import Client, Streamed
from tests.chaos.matrix import Cell
from tests.chaos.observed import wait_until
from tests.chaos.play import Play
from tests.chaos.questions import Question
from tests.chaos.stack import ChaosStack

_SETTLE_S, _DESCRIPTORS_S = 20.0, 10.0
_BUSY_S = 0.4
_SILENCING = ("kill", "stop", "thaw", "partition router-worker")


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
    busy_s: float = 0.0  # this machine did not run the network for so long: times were not measured

    def count(self, what: str, why: str, times: int = 1) -> None:
        """Something that should not have happened."""
        self.counts[what] += times
        self.problems.append(f"{what}: {why}")


class Judge:
    """Looks at a stack, and counts in an outcome."""

    def __init__(self, stack: ChaosStack, outcome: Outcome) -> None:
        self._stack = stack
        self._outcome = outcome

    def streams(self, clients: Sequence[Client], questions: Sequence[Question]) -> None:
        """Compare what clients have got with the answers of an undisturbed stack."""
        for client, question in zip(clients, questions, strict=True):
            if not client.leave.is_set():
                self._stream(client.streamed, question)

    def fault(self, play: Play, clients: Sequence[Client]) -> None:
        """Who was suspected, how soon, and how long streams then waited.

        Not when the network's process did not run for long: heartbeats were late for that reason.
        """
        lag_s = self._stack.network.faults.longest_lag_s()
        if lag_s > _BUSY_S:
            self._outcome.busy_s = lag_s
            return
        faulted = {_slot(worker) for worker in play.faulted}
        began: list[float] = []
        for router, row in self._suspicions(play.began_unix):
            if _slot(row["worker"]) in faulted:
                if router == 0:  # the one that clients prefer
                    began.append(row["at_unix"])
            else:
                self._outcome.count("misblamed", f"{row['worker']} was suspected: {row['cause']}")
        if began and play.fault in _SILENCING:
            detect_s = min(began) - play.began_unix
            self._outcome.detect_s.append(detect_s)
            for client in clients:
                self._resumed(client.streamed, play.began + detect_s)
        if play.fault == "abort" and self._outcome.cell.state == "draining":
            gaps = [client.streamed.gaps(play.began) for client in clients if not client.leave.is_set()]
            self._outcome.move_gap_ms += [max(of_stream) * 1e3 for of_stream in gaps if of_stream]

    def settled(self) -> None:
        """Nothing is held by anybody: rooms, pages, rows, descriptors."""
        deadline = time.monotonic() + _SETTLE_S
        while held := self._stack.held():
            if time.monotonic() > deadline:
                self._outcome.count("leaked_pages", str(held), len(held))
                break
        if not wait_until(lambda: not self._stack.leaked_descriptors(), _DESCRIPTORS_S):
            leaked = self._stack.leaked_descriptors()
            self._outcome.count("leaked_fds", str(leaked), sum(leaked.values()))

    def _stream(self, streamed: Streamed, question: Question) -> None:
        who = f"{streamed.request_id} ({question.asked.kind})"
        if streamed.contradicted:
            self._outcome.count("wrong_token", f"{who}: an event takes tokens back")
        if not streamed.complete:
            self._outcome.count("lost", f"{who}: {streamed.problem}")
            return
        wrong = difference(question.asked, streamed.answer, question.answer)
        if wrong is not None:
            self._outcome.count(wrong, f"{who}, resumed {streamed.resumed} times")

    def _resumed(self, streamed: Streamed, suspected: float) -> None:
        """A stream that was started again on another worker: when did its next token come?"""
        after = streamed.first_after(suspected)
        trace = self._stack.debug(f"trace/{streamed.request_id}")
        placements = trace["otherData"]["placements"] if trace is not None else []
        if after is not None and any(placed["epoch"] > 0 for placed in placements):
            self._outcome.resume_s.append(after - suspected)

    def _suspicions(self, since_unix: float) -> list[tuple[int, dict[str, Any]]]:
        """(number of the router, what it has suspected)."""
        rows: list[tuple[int, dict[str, Any]]] = []
        for router in range(len(self._stack.of_role("router"))):
            page = self._stack.debug("suspicions", router) or {"suspicions": []}
            rows += [(router, row) for row in page["suspicions"] if row["at_unix"] >= since_unix > 0]
        return rows


def _slot(worker: str) -> str:
    """The slot in a worker id: a replacement may have an id of its own."""
    return worker.partition("-")[0]
