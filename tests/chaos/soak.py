"""`make soak`: random faults at random times, over a steady load.

python -m tests.chaos.soak [--seconds N] [--seed S] [--transport shm|tcp|mooncake]

A line for each fault, then what was not as promised, then one line of JSON, as `make chaos` prints it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from random import Random

from tests.chaos.bench import Bench
from tests.chaos.client import Client
from tests.chaos.judge import Judge, Outcome
from tests.chaos.matrix import TRANSPORTS, Cell
from tests.chaos.observed import DECODE
from tests.chaos.play import Play
from tests.chaos.questions import Question
from tests.chaos.report import describe, say
from tests.chaos.stack import ChaosStack
from tests.chaos.totals import Totals

FAULTS = {
    "P": ("kill", "stop", "thaw", "partition router-worker", "partition P-D", "lossy", "slow"),
    "D": ("kill", "stop", "thaw", "partition router-worker", "partition P-D", "lossy", "slow"),
    "router": ("kill", "stop", "lossy", "slow"),
    "directory": ("kill", "stop", "lossy", "slow"),
}
_STREAMS = 6
_STREAM_BOUND_S, _PATIENCE_S = 60.0, 5.0
_QUIET_S = (0.5, 4.0)  # between two faults
_LASTS_S = 2.0  # of a fault that play does not end by itself
_PACE = {DECODE: 0.01}


class Load:
    """Streams that are asked one after the other, some at once, until `over`."""

    def __init__(self, stack: ChaosStack, questions: list[Question], seed: int) -> None:
        self.over = threading.Event()
        self.asked: list[tuple[Client, Question]] = []
        self._stack = stack
        self._questions = questions
        self._seed = seed

    def run(self, number: int) -> None:
        """One of the streams."""
        rng, count = Random(f"{self._seed}/{number}"), 0
        while not self.over.is_set():
            count += 1
            name, question = f"soak{number}-{count}", rng.choice(self._questions)
            client = Client(question.asked, name, name, self._stack.routers)
            self.asked.append((client, question))
            if rng.random() < 0.05:  # a client that leaves
                threading.Timer(rng.random(), client.leave.set).start()
            client.run(time.monotonic() + _STREAM_BOUND_S, _PATIENCE_S)


def soak(
    bench: Bench, transport: str, seconds: float, seed: int, on_outcome: Callable[[Outcome], None]
) -> None:
    """Disturb a stack for so long, then judge all of its streams."""
    stack, questions = bench.stack_of(transport, "fake", scarce=False)
    rng, load = Random(seed), Load(stack, questions.short, seed)
    with ThreadPoolExecutor(_STREAMS) as pool:
        streams: list[Future[None]] = [pool.submit(load.run, number) for number in range(_STREAMS)]
        try:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                on_outcome(_disturb(stack, rng, transport))
        finally:
            load.over.set()
        for stream in streams:
            stream.result()
    last = Outcome(Cell("all", "soak", "none", transport, "fake"))
    judge = Judge(stack, last)
    judge.streams([client for client, _ in load.asked], [question for _, question in load.asked])
    judge.settled()
    say(f"{len(load.asked)} streams")
    on_outcome(last)


def _disturb(stack: ChaosStack, rng: Random, transport: str) -> Outcome:
    """One fault of one process, and its repair."""
    for worker in stack.of_role("D"):
        worker.set_gates(pace=_PACE)
    time.sleep(rng.uniform(*_QUIET_S))
    role = rng.choice(list(FAULTS))
    fault = rng.choice(FAULTS[role])
    outcome = Outcome(Cell(role, "soak", fault, transport, "fake"))
    begun = time.monotonic()
    play = Play(fault, stack, rng.choice(stack.of_role(role)), rng)
    play.begin([])
    play.go_on()
    if fault in ("lossy", "slow"):
        time.sleep(_LASTS_S)
    problem = play.end()
    if problem is not None:
        outcome.count("zombies", problem)
    Judge(stack, outcome).fault(play, [])
    outcome.took_s = time.monotonic() - begun
    return outcome


def main() -> int:
    """0 when everything was as promised."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--transport", choices=TRANSPORTS, default="shm")
    given = parser.parse_args()
    totals = Totals()

    def take(outcome: Outcome) -> None:
        totals.add(outcome)
        say(describe(outcome))
        for problem in outcome.problems:
            say(f"       {problem}")

    with tempfile.TemporaryDirectory(prefix="baton-soak-") as files, Bench(Path(files), given.seed) as bench:
        soak(bench, given.transport, given.seconds, given.seed, take)
        totals.disturbed = bench.disturbed
    for failure in (failures := totals.failures(whole=False)):
        say(f"NOT AS PROMISED: {failure}")
    say(totals.line())
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
