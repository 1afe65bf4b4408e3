"""Run a worker so that one of its threads ends or stops coming round:
`python -m tests.support.breaks_thread FLAG MODULE --options FILE`.

When the file FLAG holds "PID THREAD FAULT" with this process's pid, the thread (loop, mailbox or events)
raises (fault "dies") or blocks for ever (fault "blocks") at its next round. Only the first of its kind does:
the worker's own mailbox, and not one that it opens later.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcache.publisher import EventPublisher
from scheduler.scheduler import Scheduler
from wire.mailbox import Mailbox

ROUNDS: dict[str, tuple[type, str]] = {
    "loop": (Scheduler, "step"),
    "mailbox": (Mailbox, "_flush"),
    "events": (EventPublisher, "_flush"),
}


def breaking(thread: str, flag: Path, intact: Callable[..., Any]) -> Callable[..., Any]:
    """The method of a thread's round, that may never return."""

    first: list[object] = []

    def round_of(*arguments: Any) -> Any:
        first.extend(arguments[: 1 - len(first)])
        wanted = flag.read_text().split() if flag.exists() else []
        if arguments[0] is first[0] and wanted[:2] == [str(os.getpid()), thread]:
            if wanted[2] == "dies":
                raise RuntimeError("this thread was told to die")
            threading.Event().wait()
        return intact(*arguments)

    return round_of


def main() -> None:
    """Patch, then run the module as if it had been started itself."""
    flag, module, *arguments = sys.argv[1:]
    for thread, (owner, name) in ROUNDS.items():
        setattr(owner, name, breaking(thread, Path(flag), getattr(owner, name)))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
