"""The command `baton trace`."""

from __future__ import annotations

import argparse
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cluster.admin_page import add_admin_arguments, admin_json, find_admin_listener, read_admin_key
from cluster.top import other_routers
from common.errors import ConfigError, WorkerLost

HELP = (
    "Print where the time of REQUEST went: its stages at the router, on prefill and on decode workers. "
    "REQUEST is the x-request-id of an answer; a router keeps the traces of its last 2048 requests."
)
_TOKENS = 1000  # threads of tokens have numbers from here on; choices are below

Event = dict[str, Any]


def add_arguments(trace: argparse.ArgumentParser) -> None:
    """Its arguments."""
    trace.add_argument("request", metavar="REQUEST")
    trace.add_argument(
        "--perfetto",
        metavar="FILE",
        type=Path,
        help="write a timeline for ui.perfetto.dev or chrome://tracing, with the tokens as they came",
    )
    add_admin_arguments(trace)
    trace.set_defaults(run=_trace)


def find_trace(url: str, key: str | None, request_id: str) -> Event:
    """The trace of a request at the router at `url`, or at another that it knows. Raises ConfigError for one
    that none of them keeps, which names those that cannot be asked: a listener on loopback of another host is
    one. Raises WorkerLost if the router at `url` does not answer."""
    path = f"/debug/trace/{quote(request_id, safe='')}"
    others = other_routers(url, key)
    try:
        return _page(url, path, key)
    except ConfigError as refused:
        problem = refused.problem
    for one in others:
        try:
            return _page(one, path, key)
        except WorkerLost:
            problem += f"; {one} does not answer"
        except ConfigError as refused:
            problem += f"; {refused.problem}" if refused.key != "worker" else ""
    raise ConfigError("REQUEST", problem, "give the x-request-id of a recent answer")


def _page(url: str, path: str, key: str | None) -> Event:
    found: Event = admin_json(url, path, key)
    return found


def perfetto(trace: Event) -> Event:
    """The trace with a slice for each token, from the one before it: a decode step as its router saw it."""
    events, about = list(trace["traceEvents"]), trace["otherData"]
    processes = {event["args"]["name"]: event["pid"] for event in events if event["ph"] == "M"}
    workers = {str(one["room"]): one["decode"] for one in about["placements"]}
    for choice, (room, times) in enumerate(sorted(about["token_ns"].items(), key=lambda one: int(one[0]))):
        where = {"pid": processes.get(workers.get(room, ""), 0), "tid": _TOKENS + choice}
        name = {"name": f"tokens of choice {choice}, at the router"}
        events.append({"ph": "M", "name": "thread_name", "args": name, **where})
        for number, (before, at) in enumerate(pairwise(times), 2):
            step = {"ph": "X", "name": f"token {number}", "ts": before / 1e3, "dur": (at - before) / 1e3}
            events.append({**step, **where})
    return {**trace, "traceEvents": events}


def table(trace: Event) -> list[str]:
    """A line for each stage, in the order in which they began."""
    events, about = trace["traceEvents"], trace["otherData"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    stages = sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"])
    width = max((len(name) for name in names.values()), default=0)
    lines = [f"{'at ms':>10} {'for ms':>10}  {'process':{width}}  stage"]
    for event in stages:
        at_ms, for_ms = (event["ts"] - stages[0]["ts"]) / 1e3, event["dur"] / 1e3
        lines.append(f"{at_ms:10.2f} {for_ms:10.2f}  {names[event['pid']]:{width}}  {event['name']}")
    ttft, total = (
        "not yet" if about[name] is None else f"{about[name]:.2f} ms" for name in ("ttft_ms", "total_ms")
    )
    lines.append(f"first token: {ttft}; whole request: {total}; KV moved: {about['kv_bytes']} bytes")
    for worker, tokens in sorted(about["cached_from"].items()):
        sources = ", ".join(f"{count:,} from {source}" for source, count in tokens.items())
        lines.append(f"prompt tokens cached on {worker}: {sources}")
    return lines


def _trace(arguments: argparse.Namespace) -> int:
    url, key = arguments.url or find_admin_listener(), read_admin_key(arguments.admin_key_file)
    try:
        trace = find_trace(url, key, arguments.request)
    except WorkerLost as lost:
        sys.stderr.write(f"baton: {lost}\n")
        return 1
    if arguments.perfetto is None:
        sys.stdout.write("\n".join(table(trace)) + "\n")
        return 0
    try:
        arguments.perfetto.write_text(json.dumps(perfetto(trace)))
    except OSError as error:
        problem = f"cannot write {arguments.perfetto}: {error.strerror}"
        raise ConfigError("--perfetto", problem, "name a file that can be written") from None
    return 0
