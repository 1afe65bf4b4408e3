"""What every test run says at its end."""

from __future__ import annotations

import sys

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the seeds that the oracle skipped, if it ran: transformers is imported only then."""
    reference = sys.modules.get("tests.support.reference")
    for line in reference.REDRAWN if reference is not None else []:
        terminalreporter.write_line(line)
