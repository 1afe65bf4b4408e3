"""Router, prefill and decode on three hosts, and every fault of a network between them.

python -m tests.hosts [--backend tcp|mooncake] [--only TEXT]

Each backend serves through loss, delay, and partitions of 5 s and of 60 s between each two hosts. Every
answer must be, token for token, what the fake engine's oracle says: it depends on every byte of KV that was
read back. The last line is JSON: {cases, wrong_token, lost, skipped}. Needs root; else it is skipped, with
the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvtransfer.mooncake_engine import MooncakeEngine
from tests.hosts.cases import DELAYED, LONG, SHORT, Case, Outcome, run_cases
from tests.hosts.network import missing, remove_stale
from tests.support.tiny_models import make_tiny

_BACKENDS = ("tcp", "mooncake")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 when nothing was lost and no token was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=_BACKENDS, help="this one only")
    parser.add_argument("--only", default="", help="cases whose name contains this, such as 'for 5 s'")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    backends = [options.backend] if options.backend else list(_BACKENDS)
    # The cases of one list are one after the other on one set of hosts; the lists run at once.
    every: list[Sequence[Case]] = [SHORT, DELAYED, *([case] for case in LONG)]
    lists = [chosen for cases in every if (chosen := [one for one in cases if options.only in one.name])]
    count = len(backends) * sum(map(len, lists))
    if os.geteuid() != 0:
        say("skipped: network namespaces need root")
        return report([], count)
    why = missing() or ("mooncake" in backends and _without_mooncake())
    if why:
        say(f"failed: {why}")
        return report([Outcome(lost=1)], 0)
    remove_stale()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="baton-hosts-") as folder:
        model = make_tiny("qwen3", Path(folder, "model"), 1)
        for backend in backends:
            with ThreadPoolExecutor(len(lists)) as pool:
                runs = [
                    pool.submit(run_cases, cases, backend, model, Path(folder, f"{backend}-{number}"))
                    for number, cases in enumerate(lists)
                ]
                outcomes += [outcome for run in runs for outcome in run.result()]
    return report(outcomes, 0)


def say(line: str) -> None:
    """At once: a run takes minutes."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def report(outcomes: Sequence[Outcome], skipped: int) -> int:
    """Print the last line. Returns the exit code."""
    wrong, lost = sum(one.wrong_token for one in outcomes), sum(one.lost for one in outcomes)
    say(json.dumps({"cases": len(outcomes), "wrong_token": wrong, "lost": lost, "skipped": skipped}))
    return 1 if wrong or lost else 0


def _without_mooncake() -> str:
    try:
        MooncakeEngine("127.0.0.1", 10.0).close()
    except Exception as error:  # noqa: BLE001  whatever it is: as root Mooncake must work
        return f"Mooncake does not work: {error}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
