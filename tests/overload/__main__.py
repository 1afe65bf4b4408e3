"""One decode worker of 4 rows with default options: 64 streams at once, then ten times what it can serve.

python -m tests.overload [--seconds S]

Every stream that is accepted must come whole and be right, without a restart; all else must be a 429 with
Retry-After; the memory of router and workers must stay flat; and soon after the load has gone, a
stream must meet the objectives again. The last line is JSON: {sent, accepted, lost, restarts, rejected,
without_retry_after, rss_growth_mib, recovered_s}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.harness.local_stack import Stack, stack
from tests.overload.load import Load
from tests.support.tiny_models import make_tiny

_ROWS = 4
_AT_ONCE = 64
_TIMES = 10  # the sustainable rate
_WORKER: dict[str, Any] = {"engine": "fake", "fake_step_s": 0.01, "max_running_requests": _ROWS}
_FIRST_S, _GAP_S = 2.0, 1.0  # the objectives: time to first token, and between two tokens
_MOST_GROWTH_MIB, _MOST_RECOVERY_S = 64, 10.0


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 when all of that held."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="of ten times the sustainable rate")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the stack is ended then, too
    with tempfile.TemporaryDirectory(prefix="baton-overload-") as folder:
        model = make_tiny("qwen3", Path(folder, "model"), 1)
        with stack(model, Path(folder), **_WORKER) as running:
            result = asyncio.run(_run(running, options.seconds))
            running.settle()
    sys.stdout.write(f"{json.dumps(result)}\n")
    held = (
        result["lost"] == result["restarts"] == result["without_retry_after"] == 0
        and result["accepted"] + result["rejected"] == result["sent"]
        and result["rss_growth_mib"] < _MOST_GROWTH_MIB
        and result["recovered_s"] <= _MOST_RECOVERY_S
    )
    return 0 if held else 1


async def _run(running: Stack, seconds: float) -> dict[str, Any]:
    async with Load(running.url) as load:
        rate = await load.sustainable_rate(2 * _ROWS)
        at_once = await load.at_once(_AT_ONCE)
        say(f"sustainable: {rate:.1f} requests/s; {_AT_ONCE} at once: {at_once}")
        memory = Memory(running)
        beaten = asyncio.create_task(memory.watch())
        flood = await load.open_loop(_TIMES * rate, seconds)
        recovered_s = await load.until_recovered(_FIRST_S, _GAP_S, 3 * _MOST_RECOVERY_S)
        beaten.cancel()
        await load.finish()
        say(f"{_TIMES} times that for {seconds:.0f} s: {flood}")
        causes = _restart_causes(running)
        say(f"restarts: {causes}; suspicions: {running.admin.get('/debug/suspicions').json()['suspicions']}")
        tally = at_once + flood
    return {
        "sent": tally.sent,
        "accepted": tally.accepted,
        "lost": tally.lost,
        "restarts": sum(causes.values()),
        "rejected": tally.rejected,
        "without_retry_after": tally.without_retry_after,
        "rss_growth_mib": round(memory.growth_mib(), 1),
        "recovered_s": round(recovered_s, 1),
    }


class Memory:
    """Resident memory of router and workers, all together, above what it is now."""

    def __init__(self, running: Stack) -> None:
        self._pids = [child.process.pid for child in (running.router, *running.workers)]
        self._first = self._most = self._now()

    async def watch(self) -> None:
        """Look once a second, until cancelled."""
        while True:
            self._most = max(self._most, self._now())
            await asyncio.sleep(1.0)

    def growth_mib(self) -> float:
        """The most that it was above the beginning."""
        return (self._most - self._first) / 1024

    def _now(self) -> int:
        kib = 0
        for pid in self._pids:
            found = re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
            assert found is not None
            kib += int(found[1])
        return kib


def _restart_causes(running: Stack) -> dict[str, int]:
    """Restarts by cause."""
    text = running.admin.get("/metrics").text
    found = re.findall(r'^baton_router_restart_causes_total\{cause="([^"]+)"\} (\S+)', text, re.MULTILINE)
    return {cause: int(float(count)) for cause, count in found}


def say(line: str) -> None:
    """At once: a run takes minutes."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
