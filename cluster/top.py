"""`baton top`: the fleet, live, in a terminal.

It reads /metrics of every router's admin listener and the workers' records of one. Any router of the
directory knows the others' listeners, so one URL is enough; those on loopback of other hosts do not answer,
and are counted as silent.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from dataclasses import dataclass

import msgspec
from rich.console import Console
from rich.live import Live

from cluster.admin_page import (
    add_admin_arguments,
    admin_json,
    admin_page,
    find_admin_listener,
    read_admin_key,
)
from cluster.top_table import frame
from common.errors import ConfigError, WorkerLost
from common.stop_signal import StopSignal
from router.dashboard.figures import Snapshot, added, parse_samples
from wire.records import WorkerRecord

HELP = (
    "Watch the routers and workers of a running Baton: roles, queues, use of KV memory, hit rate, transfers, "
    "percentiles of TTFT and ITL, errors. Ctrl-C ends it."
)
_WINDOW_S = 30.0  # over which rates and percentiles are taken
_COLUMNS = 140  # of a frame that goes to a file


@dataclass(frozen=True)
class TopSource:
    """The admin listener at `url`, with the key of all listeners."""

    url: str
    admin_key: str | None = None

    def snapshot(self) -> Snapshot:
        """What all routers say now. Raises ConfigError or WorkerLost when the one at `url` is not there."""
        workers = admin_json(self.url, "/debug/workers", self.admin_key)["workers"]
        texts, silent = {self.url: self._page(self.url, "/metrics")}, []
        for url in other_routers(self.url, self.admin_key):
            try:
                texts[url] = self._page(url, "/metrics")
            except (ConfigError, WorkerLost):
                silent.append(url)
        return Snapshot(
            at=time.monotonic(),
            samples=added(parse_samples(text) for text in texts.values()),
            workers=msgspec.convert(workers, list[WorkerRecord]),
            routers=list(texts),
            silent=silent,
        )

    def _page(self, url: str, path: str) -> str:
        return admin_page(url, path, self.admin_key)


def other_routers(url: str, admin_key: str | None) -> list[str]:
    """The admin listeners of all routers but the one at `url`, which names them. Raises what admin_page
    raises."""
    groups = admin_json(url, "/admin/routers", admin_key)
    urls = {f"{group['labels']['__scheme__']}://{target}" for group in groups for target in group["targets"]}
    return sorted(urls - {url.rstrip("/")})


def add_arguments(top: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_admin_arguments(top)
    top.add_argument(
        "--interval", type=float, default=2.0, metavar="S", help="between two frames (%(default)s)"
    )
    top.add_argument("--once", action="store_true", help="print one frame: figures since the routers' start")
    top.set_defaults(run=_top)


def _top(arguments: argparse.Namespace) -> int:
    if arguments.interval <= 0:
        raise ConfigError("--interval", f"{arguments.interval:g} is not a time", "give some seconds")
    key = read_admin_key(arguments.admin_key_file)
    source = TopSource(arguments.url or find_admin_listener(), key)
    try:
        first = source.snapshot()
        if arguments.once:
            Console(width=None if sys.stdout.isatty() else _COLUMNS, highlight=False).print(
                frame(first, None)
            )
        else:
            _watch(source, first, arguments.interval)
    except WorkerLost as lost:
        sys.stderr.write(f"baton: {lost}\n")
        return 1
    return 0


def _watch(source: TopSource, first: Snapshot, interval_s: float) -> None:
    """Frame after frame, until a signal. Raises what `snapshot` raises: its router may be gone."""
    stop, seen = StopSignal(), deque([first])
    with Live(frame(first, None), console=Console(highlight=False), screen=True, auto_refresh=False) as live:
        while not stop.wait(interval_s):
            now = source.snapshot()
            while len(seen) > 1 and now.at - seen[0].at > _WINDOW_S:
                seen.popleft()
            live.update(frame(now, seen[0]), refresh=True)
            seen.append(now)
