"""What a run has sent and found, and what must not have changed meanwhile: memory, descriptors, answers."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.harness.local_stack import Stack
from tests.support.sse import DONE, sse_events

_ANSWER_S = 1.0
_GIVE_UP_S = 10.0
_SHRINK_S = 45.0  # longer than a mailbox keeps a connection to a peer that is down
_MOST_GROWTH_MIB = 64.0
_QUESTION = {
    "model": "m",
    "messages": [{"role": "user", "content": "Tell me something."}],
    "max_tokens": 8,
    "temperature": 0,
    "stream": True,
}
_TOLD = 20  # of a kind of finding


@dataclass
class Findings:
    """Counts, and a line for each thing that is wrong."""

    http: int = 0
    frames: int = 0
    peers: int = 0
    unexpected_5xx: int = 0
    hangs: int = 0
    crashes: int = 0
    rss_growth_mib: float = 0.0  # of all processes of a stack; the larger growth of the two stacks
    fd_growth: int = 0
    _told: int = field(default=0, repr=False)

    def tell(self, line: str) -> None:
        """Print a line about something that is wrong: the first few, each cut to a readable length."""
        self._told += 1
        if self._told <= _TOLD:
            say(f"WRONG: {line[:2000]}")

    @property
    def held(self) -> bool:
        """Whether everything held."""
        nothing = self.unexpected_5xx == self.hangs == self.crashes == self.fd_growth == 0
        return nothing and self.rss_growth_mib < _MOST_GROWTH_MIB

    def line(self) -> str:
        """The last line of a run."""
        return json.dumps({name: value for name, value in vars(self).items() if not name.startswith("_")})


class Honest:
    """A client that asks the same question again and again, and expects the same answer."""

    def __init__(self, running: Stack, findings: Findings) -> None:
        self._running = running
        self._findings = findings
        self._http = httpx.Client(base_url=running.url, timeout=10.0)
        self._expected = self._ask()
        assert self._expected, "the model has an answer"

    def check(self, after: str) -> None:
        """Ask, and count a hang if the answer does not come within a second, or is another one.

        A late answer is asked for once more: others use this machine, too.
        """
        for last in (False, True):
            began = time.monotonic()
            try:
                answer = self._ask()
            except (httpx.HTTPError, ValueError, KeyError) as error:
                answer = f"{type(error).__name__}: {error}"
            took_s = time.monotonic() - began
            if answer == self._expected and took_s <= _ANSWER_S:
                return
            if last or answer != self._expected:
                self._findings.hangs += 1
                self._findings.tell(f"after {after}: {answer!r} in {took_s:.2f} s, not {self._expected!r}")
                return

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _ask(self) -> str:
        with self._http.stream("POST", "/v1/chat/completions", json=_QUESTION) as answer:
            if answer.status_code != 200:
                return f"status {answer.status_code}: {answer.read().decode()}"
            events = list(sse_events(_lines(answer, time.monotonic() + _GIVE_UP_S)))
        if not events or events[-1].data != DONE:
            return f"broken off: {events[-1:]}"
        return "".join(event.json["choices"][0]["delta"]["content"] for event in events[:-1])


def _lines(answer: httpx.Response, deadline: float) -> Iterator[str]:
    """The lines that come in time, comments too: they come for as long as a request waits."""
    for line in answer.iter_lines():
        if time.monotonic() > deadline:
            return
        yield line


class Footprint:
    """Resident memory and descriptors of the stack's processes, above what they were."""

    def __init__(self, running: Stack) -> None:
        children = (running.directory, running.router, *running.workers)
        self._names = {child.process.pid: child.module for child in children}
        self._memory = {pid: _rss_mib(pid) for pid in self._names}
        self._descriptors = {pid: _descriptors(pid) for pid in self._names}

    def compare(self, findings: Findings) -> None:
        """Write the growth into the findings. Connections to peers that are gone are closed a while later."""
        deadline = time.monotonic() + _SHRINK_S
        while (more := self._fd_growth()) and time.monotonic() < deadline:
            time.sleep(0.5)
        in_all = 0.0
        for pid, name in self._names.items():
            grown = _rss_mib(pid) - self._memory[pid]
            fds = self._descriptors[pid]
            say(f"{name}: {self._memory[pid]:.0f} MiB {grown:+.1f}, {fds} files {_descriptors(pid) - fds:+d}")
            in_all += grown
        findings.rss_growth_mib = round(max(findings.rss_growth_mib, in_all), 1)
        findings.fd_growth += more

    def _fd_growth(self) -> int:
        return sum(max(0, _descriptors(pid) - before) for pid, before in self._descriptors.items())


class Logs:
    """What the stack's processes write to their logs: an exception that nobody expected is a crash."""

    def __init__(self, running: Stack) -> None:
        self._children = (running.directory, running.router, *running.workers)
        self._read = {child.log: 0 for child in self._children}

    def check(self, findings: Findings, after: str) -> None:
        """Count tracebacks since the last call, and processes that have ended."""
        for child in self._children:
            if (code := child.process.poll()) is not None:
                findings.crashes += 1
                findings.tell(f"after {after}: {child.module} has ended ({code})")
            text = child.log.read_text(errors="replace")[self._read[child.log] :]
            self._read[child.log] += len(text)
            for found in re.finditer(r"^Traceback .*?(?=^Traceback |\Z)", text, re.MULTILINE | re.DOTALL):
                findings.crashes += 1
                findings.tell(f"after {after}: {child.module}:\n{found[0]}")


def say(line: str) -> None:
    """At once: a run takes minutes."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _rss_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
