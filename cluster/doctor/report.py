"""Findings as a table for people, or as JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cluster.doctor.facts import Finding, Verdict

_STYLES = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.FAULT: "bold red"}
_NO_TERMINAL_COLUMNS = 200


def print_table(findings: Sequence[Finding]) -> None:
    """One line for each finding, then how many there are. Text of nodes is printed as it is."""
    console = Console(width=None if sys.stdout.isatty() else _NO_TERMINAL_COLUMNS)
    table = Table("check", "node", "", "found", "remedy")
    for one in findings:
        verdict = Text(str(one.verdict), _STYLES[one.verdict])
        table.add_row(Text(one.check), Text(one.node), verdict, Text(one.found), Text(one.remedy))
    console.print(table)
    counts = {verdict: sum(one.verdict is verdict for one in findings) for verdict in Verdict}
    console.print(f"{counts[Verdict.OK]} ok, {counts[Verdict.NOTE]} notes, {counts[Verdict.FAULT]} faults")


def print_json(findings: Sequence[Finding]) -> None:
    """A list of objects with the fields of Finding."""
    sys.stdout.write(json.dumps([one._asdict() for one in findings]) + "\n")
