"""What a chaos run prints while it runs."""

from __future__ import annotations

import sys

from tests.chaos.judge import Outcome


def say(line: str) -> None:
    """A line at once: a run takes an hour."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def describe(outcome: Outcome) -> str:
    """A scenario's line, with which it can be repeated."""
    verdict = "missed" if outcome.missed else "FAILED" if outcome.counts else "ok"
    detect = f" detect {outcome.detect_s[0]:.2f}" if outcome.detect_s else ""
    resume = f" resume {max(outcome.resume_s):.2f}" if outcome.resume_s else ""
    busy = f" busy {outcome.busy_s:.2f}" if outcome.busy_s else ""
    return f"{verdict:7}{outcome.took_s:5.1f} s  {outcome.cell}{detect}{resume}{busy}"
