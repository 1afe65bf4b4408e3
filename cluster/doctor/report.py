"""Findings as a table for people, or as JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cluster.doctor.facts import Finding, Grade

_STYLES = {Grade.OK: "green", Grade.NOTE: "yellow", Grade.FAULT: "bold red"}
_NO_TERMINAL_COLUMNS = 200


def print_table(findings: Sequence[Finding]) -> None:
    """One line for each finding, then how many there are. Text of nodes is printed as it is."""
    console = Console(width=None if sys.stdout.isatty() else _NO_TERMINAL_COLUMNS)
    table = Table("check", "node", "", "found", "remedy")
    for one in findings:
        grade = Text(str(one.grade), _STYLES[one.grade])
        table.add_row(Text(one.check), Text(one.node), grade, Text(one.found), Text(one.remedy))
    console.print(table)
    counts = {grade: sum(one.grade is grade for one in findings) for grade in Grade}
    console.print(f"{counts[Grade.OK]} ok, {counts[Grade.NOTE]} notes, {counts[Grade.FAULT]} faults")


def print_json(findings: Sequence[Finding]) -> None:
    """A list of objects with the fields of Finding."""
    sys.stdout.write(json.dumps([one._asdict() for one in findings]) + "\n")
