"""Puts every mutant into a copy of the tree and runs its tests: do they see it?

python -m tests.mutants [--only TEXT] [--jobs N] [--unchecked]

Ends with `killed N of M`, after a line for each survivor with the reason. Mutants whose tests are all skipped
here are not among them. The exit code is 0 when at least 95% were killed, and all tests pass without a
mutant.
"""

from __future__ import annotations

import argparse
import queue
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from tests.mutants.curated import MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.sandbox import Sandbox, Verdict

_WANTED = 0.95


def say(line: str) -> None:
    """At once: a run takes long."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="mutants whose line contains this, as it is printed")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at once")
    parser.add_argument("--unchecked", action="store_true", help="do not run the tests unspoilt first")
    options = parser.parse_args(argv)
    chosen = [mutant for mutant in MUTANTS if options.only in str(mutant)]
    if not chosen:  # without a name pytest would run all tests
        parser.error(f"no mutant's line has {options.only!r} in it")
    with ExitStack() as until_here:
        folder = until_here.enter_context(tempfile.TemporaryDirectory(prefix="baton-mutants-"))
        sandboxes = [Sandbox(Path(folder, str(number))) for number in range(options.jobs)]
        for sandbox in sandboxes:
            until_here.callback(sandbox.close)
        if not options.unchecked and not _is_green(sandboxes[0], chosen, options.jobs):
            return 1
        verdicts = _try_all(sandboxes, chosen)
    return _report(verdicts)


def _is_green(sandbox: Sandbox, mutants: Sequence[Mutant], jobs: int) -> bool:
    """Whether all tests pass without a mutant. If they did not, their failures would say nothing."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    arguments = ["-n", str(jobs), "--dist", "worksteal"] if jobs > 1 else []
    status, said = sandbox.run_all(tests, *arguments)
    say(f"without a mutant: {said}")
    return status == 0


def _try_all(sandboxes: Sequence[Sandbox], mutants: Sequence[Mutant]) -> list[Verdict]:
    """Each sandbox takes the next mutant when it is free."""
    free: queue.SimpleQueue[Sandbox] = queue.SimpleQueue()
    for sandbox in sandboxes:
        free.put(sandbox)

    def one(mutant: Mutant) -> Verdict:
        sandbox = free.get()
        try:
            verdict = sandbox.try_out(mutant)
        finally:
            free.put(sandbox)
        say(f"{verdict.outcome:8} {verdict.seconds:5.1f} s  {mutant}: {verdict.why}")
        return verdict

    with ThreadPoolExecutor(len(sandboxes)) as pool:
        return list(pool.map(one, mutants))


def _report(verdicts: Sequence[Verdict]) -> int:
    for verdict in verdicts:
        if verdict.outcome == "invalid":
            say(f"invalid: {verdict.mutant}: {verdict.why}")
    survivors = [verdict.mutant for verdict in verdicts if verdict.outcome == "survived"]
    for mutant in survivors:
        say(f"survivor: {mutant}: {mutant.survives or 'NO REASON IS KNOWN: a test is missing'}")
    run = [verdict for verdict in verdicts if verdict.outcome != "skipped"]
    killed = sum(verdict.outcome == "killed" for verdict in run)
    skipped = len(verdicts) - len(run)
    say(f"killed {killed} of {len(run)}" + (f"; {skipped} need another machine" if skipped else ""))
    sound = all(verdict.outcome != "invalid" for verdict in run)
    return 0 if sound and run and killed >= _WANTED * len(run) else 1


if __name__ == "__main__":
    sys.exit(main())
