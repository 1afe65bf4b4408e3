"""What holds for every test run, and what it says at its end, however many jobs it had."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import certifi
import pytest
from hypothesis import settings

from tests.support.covering import leave_out

# No example has a time limit: on a busy machine any of them may take long. A test sees the same examples each
# time, so that a change alone can make it fail; `make invariants` draws others, and twice as many.
settings.register_profile("baton", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("random", deadline=None)
settings.load_profile("baton")

# httpx reads the authorities that it trusts for every client, also of plain HTTP: 40 ms for all of them.
_NO_AUTHORITY = str(Path(__file__).parent / "data" / "no_authority.pem")
certifi.where = lambda: _NO_AUTHORITY

_redrawn: list[str] = []  # what other jobs have said


def _own() -> list[str]:
    """The seeds that the oracle skipped, if it ran here: transformers is imported only then."""
    reference = sys.modules.get("tests.support.reference")
    return list(reference.REDRAWN) if reference is not None else []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before pytest leaves out what `-m` does not want."""
    leave_out(items)


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end: a collection of garbage does not look through them each time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A job tells the run it belongs to."""
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["redrawn"] = _own()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A job has ended; one that crashed says nothing."""
    _redrawn.extend(getattr(node, "workeroutput", {}).get("redrawn", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print them."""
    for line in sorted({*_redrawn, *_own()}):
        terminalreporter.write_line(line)
