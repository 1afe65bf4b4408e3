"""docs/api-parity.md: rows have states, the tests that they name exist, and the counts are their sums."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

from tests.test_owner_map import definitions
from tools.shipped import ROOT

_PAGE = ROOT / "docs" / "api-parity.md"
_OURS = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
_THEIRS = re.compile(r"`test_\w+`(?: \((\d+)\))?")
_ALL = re.compile(r": (?:all|the other) (\d+)$")
_STATES = {"held by ": "held", "not applicable: ": "not applicable", "missing: ": "missing"}
_PROJECTS = ("vLLM", "SGLang")


@cache
def _names(file: Path) -> set[str]:
    return set(definitions(file))


def _rows() -> list[tuple[str, str, str, str]]:
    """Project, source tests, what they check, state."""
    found, project = [], ""
    for line in _PAGE.read_text().splitlines():
        if line.startswith("## "):
            project = line.removeprefix("## ")
        if line.startswith("| ") and project in _PROJECTS and not line.startswith("| source test"):
            tests, checks, state = (cell.strip() for cell in line.strip("|").split(" | "))
            found.append((project, tests, checks, state))
    return found


def _count(tests: str) -> int:
    """How many source tests a row is about: those that it names, or the number that it says."""
    said = _ALL.search(tests)
    if said is not None:
        return int(said[1])
    return sum(int(one[1] or 1) for one in _THEIRS.finditer(tests))


def _state(state: str) -> str:
    (found,) = (name for start, name in _STATES.items() if state.startswith(start))
    return found


def test_every_row_has_a_state_and_a_reason() -> None:
    rows = _rows()
    assert len(rows) > 200
    for _, tests, checks, state in rows:
        assert _count(tests) > 0, tests
        assert checks, tests
        assert _state(state)
        assert len(state) > len(_state(state)) + 3, tests
        assert (_state(state) == "held") == bool(_OURS.search(state)), tests


def test_every_test_that_the_page_names_exists() -> None:
    for file, test in _OURS.findall(_PAGE.read_text()):
        assert Path(ROOT, file).is_file(), file
        assert test in _names(ROOT / file), f"{file}::{test}"


def test_a_source_test_is_in_one_row() -> None:
    seen = Counter((project, tests) for project, tests, _, _ in _rows())
    assert not [row for row, times in seen.items() if times > 1 and "test_" in row[1] and ": all" in row[1]]


def test_the_counts_are_the_sums_of_the_rows() -> None:
    counted: dict[str, Counter[str]] = {project: Counter() for project in (*_PROJECTS, "both")}
    for project, tests, _, state in _rows():
        for of in (project, "both"):
            counted[of][_state(state)] += _count(tests)
    for project, counts in counted.items():
        told = [str(counts.total()), *(str(counts[state]) for state in _STATES.values())]
        assert f"| {project} | {' | '.join(told)} |" in _PAGE.read_text(), (project, told)
