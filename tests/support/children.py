"""The processes that a process has started."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def children_of(pid: int | str) -> set[int]:
    """Those that have not been waited for. `pid` may be "self"."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found |= {int(child) for child in (task / "children").read_text().split()}
    return found
