"""`make chaos`: the matrix of docs/reliability.md over real processes.

python -m tests.chaos [--scenarios N] [--seed S] [--only ROLE/STATE/FAULT/TRANSPORT/ENGINE]

A line for each scenario, then what was not as promised, then one line of JSON.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from tests.chaos.bench import Bench
from tests.chaos.matrix import Cell, cells
from tests.chaos.report import describe, say
from tests.chaos.totals import Totals

_AT_ONCE = 40  # scenarios that are sorted, so that those of one stack follow each other
_MOST_DRAWN = 1.2  # for each that is to be counted


def sorted_by_stack(drawn: Iterator[Cell], count: int) -> Iterator[Cell]:
    """The first cells, in an order in which a stack is used for many before the next one is built."""
    chosen = itertools.islice(drawn, count)
    while block := list(itertools.islice(chosen, _AT_ONCE)):
        yield from sorted(block, key=lambda cell: (cell.transport, cell.engine, cell.state == "retracted"))


def main() -> int:
    """0 when everything was as promised."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenarios", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    totals, begun = Totals(), time.monotonic()
    with ExitStack() as cleanup:
        files = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="baton-chaos-")))
        bench = cleanup.enter_context(Bench(files, given.seed))
        drawn, played = cells(given.seed, given.only), 0
        # A scenario that missed its state is not counted: another takes its place, within bounds.
        while totals.scenarios < given.scenarios and played <= _MOST_DRAWN * given.scenarios:
            for cell in sorted_by_stack(drawn, given.scenarios - totals.scenarios):
                played += 1
                outcome = bench.play(cell, played)
                totals.add(outcome)
                totals.disturbed = bench.disturbed
                say(f"{played:4} {describe(outcome)}")
                for problem in outcome.problems:
                    say(f"       {problem}")
    failures = totals.failures(whole=not given.only)
    if totals.scenarios < given.scenarios:
        failures.append(f"only {totals.scenarios} scenarios reached their state")
    say(f"{time.monotonic() - begun:.0f} s; too busy to measure times: {totals.busy} scenarios")
    for failure in failures:
        say(f"NOT AS PROMISED: {failure}")
    say(totals.line())
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
