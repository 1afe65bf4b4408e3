"""docs/security.md: each threat has what stops it, and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.test_owner_map import definitions
from tools.shipped import ROOT

_PAGE = ROOT / "docs" / "security.md"
_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(test_\w+))?`")
_WITHOUT_A_TEST = ("another user of the host connects to shared memory",)  # it needs a second user


def _threats() -> list[list[str]]:
    found, in_table = [], False
    for line in _PAGE.read_text().splitlines():
        in_table = line.startswith("| threat |") or (in_table and line.startswith("|"))
        if in_table:
            found.append([cell.strip() for cell in line.strip("|").split("|")])
    return [row for row in found if row[0] != "threat" and not row[0].startswith("---")]


def test_every_threat_names_its_tests() -> None:
    rows = _threats()
    assert len(rows) >= 50
    for row in rows:
        assert len(row) == 3, row
        threat, stopped_by, tests = row
        assert stopped_by, threat
        assert _TEST.search(tests) or threat in _WITHOUT_A_TEST, threat


def test_every_test_that_the_page_names_exists() -> None:
    for file, test in _TEST.findall(_PAGE.read_text()):
        assert Path(ROOT, file).is_file(), file
        assert not test or test in definitions(ROOT / file), f"{file}::{test}"
