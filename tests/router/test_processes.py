"""RouterProcesses: a process that has ended is replaced, whatever goes wrong meanwhile."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from router import processes
from router.processes import RouterProcesses

SERVES = 'import sys; print(\'{"mailbox": "tcp://%s"}\', flush=True); sys.stdin.readline(); sys.stdin.read()'
CHATTERS = "import sys; print('hello', flush=True); sys.stdin.read()"


class Group:
    """Notes who serves."""

    def __init__(self) -> None:
        self.serving: set[str] = set()
        self.changed = asyncio.Event()

    def join(self, mailbox: str) -> None:
        self.serving.add(mailbox)
        self.changed.set()

    def leave(self, mailbox: str) -> None:
        self.serving.remove(mailbox)


def test_a_process_is_replaced_after_the_machine_had_none_and_one_spoke_nonsense(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[asyncio.subprocess.Process] = []
    real = asyncio.create_subprocess_exec

    async def run() -> None:
        scripts: Iterator[str | Exception] = iter(
            [SERVES % "first", OSError(11, "no process"), CHATTERS, SERVES % "second"]
        )

        async def start(*command: str, **streams: Any) -> asyncio.subprocess.Process:
            script = next(scripts)
            if isinstance(script, Exception):
                raise script
            started.append(await real(sys.executable, "-c", script, **streams))
            return started[-1]

        monkeypatch.setattr(processes.asyncio, "create_subprocess_exec", start)
        monkeypatch.setattr(processes, "_PAUSE_S", 0.01)
        group: Any = Group()
        kept = RouterProcesses([], group, None)
        await kept.start(1)
        assert group.serving == {"tcp://first"}
        group.changed.clear()
        started[0].kill()
        await group.changed.wait()
        assert group.serving == {"tcp://second"}
        await kept.close()
        assert all(process.returncode is not None for process in started)

    asyncio.run(asyncio.wait_for(run(), 30.0))
