"""Run pytest and end with ONE line: `N passed`, or `N passed, M skipped, K failed`.

python -m tools.run_tests MARKERS [--jobs N] [PATH ...]

Several jobs run at once: tests of real processes wait half of their time, and every test has its own ports
and directories.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter

import pytest

from common.arguments import ExactParser

_MOST_JOBS = 4  # the processes of a job may take 2 GiB
_WAITING_JOBS = 1  # more than there are cores: two jobs keep two cores half busy, and four gain nothing


class _Tally:
    """Counts outcomes over all jobs; an error in set-up or tear-down is a failure."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.outcomes["failed"] += 1
        elif report.skipped:
            self.outcomes["skipped"] += 1
        elif report.when == "call":
            self.outcomes["passed"] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcomes["failed"] += 1

    def line(self) -> str:
        passed, skipped, failed = (self.outcomes[name] for name in ("passed", "skipped", "failed"))
        return f"{passed} passed" + (f", {skipped} skipped, {failed} failed" if skipped or failed else "")


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 only when something passed and nothing failed."""
    parser = ExactParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("markers", help="a pytest -m expression")
    parser.add_argument("paths", nargs="*", default=[])
    parser.add_argument(
        "--jobs", type=int, default=min(_MOST_JOBS, (os.cpu_count() or 1) + _WAITING_JOBS), help="at once"
    )
    options, rest = parser.parse_known_args(argv)
    tally = _Tally()
    arguments = ["-m", options.markers, "-rfEs", "--durations=5", *options.paths, *rest]
    if options.jobs > 1:
        arguments += ["-n", str(options.jobs), "--dist", "worksteal"]  # neighbours share fixtures
    status = pytest.main(arguments, plugins=[tally])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        tally.outcomes["failed"] += 1
    sys.stdout.write(f"{tally.line()}\n")
    return 0 if tally.outcomes["passed"] and not tally.outcomes["failed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
