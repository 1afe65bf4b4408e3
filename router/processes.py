"""RouterProcesses: the processes of a router on one port. One process is one core of Python.

Each is a whole router: it follows the same directory and the same events, and tells the others the load it
has assigned (placement/peers.py), as routers on other hosts do. The kernel spreads connections over the
processes (SO_REUSEPORT). A process ends when its stdin is closed, so none outlives its supervisor.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from typing import NamedTuple

from router.process_group import ProcessGroup

log = logging.getLogger(__name__)

_READY_S = 60.0
_CLOSE_S = 15.0
_PAUSE_S = 1.0  # before one that has ended is started again


class ProcessFailed(Exception):
    """A process of the router did not start. `code` is its exit code; it has said why on stderr.

    None: it had to be killed, as it said nothing in time, or something that is not understood.
    """

    def __init__(self, code: int | None) -> None:
        super().__init__(f"a router process did not start (exit code {code})")
        self.code = code


class _Further(NamedTuple):
    process: Process
    mailbox: str


class RouterProcesses:
    """Starts processes, starts those again that end, and ends them."""

    def __init__(self, arguments: Sequence[str], group: ProcessGroup, resume_key: str | None) -> None:
        """`python -m router ARGUMENTS STDOUT` is one of them: it has this process's stdout as a descriptor,
        for what follows its ready line. `group` is told of those that serve.

        `resume_key` is the first line on the stdin of each: every user of the machine can read arguments.
        """
        self._stdout = os.dup(sys.stdout.fileno())
        self._command = [sys.executable, "-m", "router", *arguments, str(self._stdout)]
        self._resume_key = resume_key or ""
        self._group = group
        self._keepers: list[asyncio.Task[None]] = []
        self._running: set[Process] = set()
        self._closing = False

    async def start(self, count: int) -> None:
        """Returns when all serve. Raises ProcessFailed when one does not."""
        started = await asyncio.gather(*(self._spawn() for _ in range(count)), return_exceptions=True)
        for further in started:
            if isinstance(further, BaseException):
                raise further
            self._keepers.append(asyncio.create_task(self._keep(further)))

    def ask_to_end(self) -> None:
        """Tell them to end, without waiting. They end their streams at once."""
        self._closing = True
        for keeper in self._keepers:
            keeper.cancel()
        for process in self._running:
            assert process.stdin is not None
            process.stdin.close()

    async def close(self) -> None:
        """End them. One that does not end by itself is killed. Call it once."""
        self.ask_to_end()
        ending = [*self._running]
        ends = {asyncio.create_task(process.wait()): process for process in ending}
        if ends:
            _, late = await asyncio.wait(ends, timeout=_CLOSE_S)
            for end in late:
                ends[end].kill()
                await end
        os.close(self._stdout)

    async def _spawn(self) -> _Further:
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE, pass_fds=(self._stdout,)
        )
        self._running.add(process)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{self._resume_key}\n".encode())
        try:
            said = await asyncio.wait_for(process.stdout.readline(), _READY_S)
            further = _Further(process, json.loads(said)["mailbox"])
        except (TimeoutError, ValueError, LookupError, TypeError):
            self._running.discard(process)
            raise ProcessFailed(await _end(process)) from None
        self._group.join(further.mailbox)
        return further

    async def _keep(self, further: _Further) -> None:
        while not self._closing:
            code = await further.process.wait()
            self._running.discard(further.process)
            self._group.leave(further.mailbox)
            log.warning("a router process has ended (%s); another takes its place", code)
            further = await self._replacement()

    async def _replacement(self) -> _Further:
        while True:
            await asyncio.sleep(_PAUSE_S)
            try:
                return await self._spawn()
            except (ProcessFailed, OSError) as error:  # OSError: no memory or process for it right now
                log.warning("a router process is not replaced yet: %s", error)


async def _end(process: Process) -> int | None:
    """The exit code of a process that ends or does not serve; None: it had to be killed."""
    try:
        return await asyncio.wait_for(process.wait(), _PAUSE_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        return None
