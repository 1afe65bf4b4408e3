"""Totals of a run, and whether they are what docs/reliability.md promises."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field

from tests.chaos.faults import ROLES
from tests.chaos.judge import Outcome

ZEROS = ("lost", "doubled", "wrong_token", "leaked_pages", "leaked_fds", "misblamed")
_MOST_DETECT_S, _MOST_RESUME_S, _MOST_GAP_MS = 2.0, 3.0, 300.0


@dataclass
class Totals:
    """Sums over scenarios. `disturbed`: messages by the role of their sender."""

    scenarios: int = 0
    missed: int = 0
    busy: int = 0  # of the scenarios: streams and memory were judged, times were not
    counts: Counter[str] = field(default_factory=Counter)
    disturbed: Counter[str] = field(default_factory=Counter)
    detect_s: list[float] = field(default_factory=list)
    resume_s: list[float] = field(default_factory=list)
    move_gap_ms: list[float] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count a scenario; one that missed its state counts only as missed."""
        self.missed += outcome.missed
        self.scenarios += not outcome.missed
        self.busy += outcome.busy_s > 0
        self.counts.update(outcome.counts)
        self.detect_s += outcome.detect_s
        self.resume_s += outcome.resume_s
        self.move_gap_ms += outcome.move_gap_ms

    def line(self) -> str:
        """The last line of a run."""
        return json.dumps(
            {
                "scenarios": self.scenarios,
                "missed": self.missed,
                **{name: self.counts[name] for name in ZEROS},
                "detect_p99_s": p99(self.detect_s),
                "resume_p99_s": p99(self.resume_s),
                "move_gap_p99_ms": p99(self.move_gap_ms),
                "moved_recomputed_tokens": self.counts["moved_recomputed_tokens"],
                "disturbed": {role: self.disturbed[role] for role in ROLES},
            }
        )

    def failures(self, whole: bool) -> list[str]:
        """What is not as promised. `whole`: the run was long enough for every sender to be disturbed."""
        wrong = [f"{name} is {count}" for name, count in self.counts.items() if count]
        for name, values, most in (
            ("detect_p99_s", self.detect_s, _MOST_DETECT_S),
            ("resume_p99_s", self.resume_s, _MOST_RESUME_S),
            ("move_gap_p99_ms", self.move_gap_ms, _MOST_GAP_MS),
        ):
            found = p99(values)
            if found is not None and found >= most:
                wrong.append(f"{name} is {found}")
        if whole:
            wrong += [f"nothing that {role} sent was disturbed" for role in ROLES if not self.disturbed[role]]
        if not self.scenarios:
            wrong.append("no scenario was played")
        return wrong


def p99(values: list[float]) -> float | None:
    """The value that 99 of 100 do not exceed; None without values."""
    if not values:
        return None
    ranked = sorted(values)
    return round(ranked[min(len(ranked) - 1, int(0.99 * len(ranked)))], 3)
