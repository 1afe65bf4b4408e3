"""The command `baton replay`: single runs, and the comparison of all policies."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from common.errors import ConfigError
from common.options import parse_options
from common.settings import assign, put
from router.placement.policies import POLICIES
from simulator.autoscale import compare
from simulator.options import SimulationOptions
from simulator.summary import Summary
from simulator.sweep import Pool, run_once
from simulator.table import as_json, as_table, comparison_table
from simulator.traces import read_trace

HOT_TRACE = "hot:1"
_SHARES_OF_ROUND_ROBIN = (0.5, 1.0, 1.5)
_PROCESSES = 2


def replay(arguments: argparse.Namespace) -> int:
    """Run the command. Raises ConfigError for invalid arguments."""
    options = make_options(arguments)
    asked = arguments.policy or options.policy
    policies = _policies(asked)
    if asked == "all" and arguments.speed is not None:
        raise ConfigError("--speed", "--policy all finds the speeds", "leave it out, or name the policies")
    if arguments.png is not None:
        _check_picture(arguments.png)
    speeds = [options.speed] if arguments.speed is None else _speeds(arguments.speed)
    read_trace(arguments.trace)  # a wrong one is reported before anything starts
    wanted = [
        options.model_copy(update={"policy": policy, "speed": speed})
        for policy in policies
        for speed in speeds
    ]
    report = _Report(sys.stderr)
    if arguments.autoscale is not None:
        if len(wanted) > 1:
            problem = "it compares fleets at one speed, under one policy"
            raise ConfigError("--autoscale", problem, "give one --speed and one --policy")
        return _autoscale(arguments, wanted[0])
    if asked == "all":
        result = _compare(arguments.trace, options, policies, report)
    elif len(wanted) == 1:
        result = {"runs": [run_once(arguments.trace, wanted[0], report.share)]}
    else:
        with Pool(_processes(), report.finished) as pool:
            result = {"runs": pool.all([(arguments.trace, one) for one in wanted])}
    sys.stdout.write(as_json(result) if arguments.json else as_table(result, HOT_TRACE))
    if arguments.png is not None:
        from simulator.plot import draw  # imports matplotlib, which is optional

        title = f"{Path(arguments.trace).name}: {options.prefill} prefill, {options.decode} decode workers"
        draw(report.of(arguments.trace) or result["runs"], options.slo_ttft_s, title, arguments.png)
    return 0


_FLAGS = {
    "prefill": "prefill",
    "decode": "decode",
    "routers": "routers",
    "schedule": "worker.schedule",
    "slo_ttft": "slo_ttft_s",
    "slo_itl": "slo_itl_s",
    "seed": "seed",
    "prefill_rate": "worker.prefill_tokens_per_s",
    "kv_tokens": "worker.kv_tokens",
    "hicache_ratio": "worker.hicache_ratio",
    "hicache_size": "worker.hicache_size",
}
"""The option that a flag sets."""


def make_options(arguments: argparse.Namespace) -> SimulationOptions:
    """The options that the flags give, but for --policy and --speed, which may be several. `--set` overrides
    the others."""
    raw: dict[str, Any] = {}
    for flag, path in _FLAGS.items():
        value = getattr(arguments, flag)
        if value is not None:
            put(raw, path, value)
    if arguments.colocated:
        put(raw, "prefill", 0)
    if arguments.peer_fetch is not None:
        put(raw, "peer_fetch", arguments.peer_fetch)
    for assignment in arguments.set:
        assign(raw, assignment)
    return parse_options(SimulationOptions, raw)


def _check_picture(path: Path) -> None:
    """Raises ConfigError when no picture can be drawn there."""
    if not path.absolute().parent.is_dir():
        raise ConfigError("--png", f"there is no directory {path.parent}", "make it first")
    if path.is_dir():
        raise ConfigError("--png", f"{path} is a directory", "name a file in it")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--png", "matplotlib is not installed", "pip install 'baton-serve[plot]'")


def _policies(text: str) -> list[str]:
    policies = list(POLICIES) if text == "all" else text.split(",")
    for policy in policies:
        if policy not in POLICIES:
            known = ", ".join([*POLICIES, "all"])
            raise ConfigError("--policy", f"{policy!r} is unknown", f"choose one of {known}")
    return policies


def _speeds(text: str) -> list[float]:
    try:
        speeds = [float(part) for part in text.split(",")]
    except ValueError:
        speeds = []
    if not speeds or not all(0 < speed < math.inf for speed in speeds):
        raise ConfigError("--speed", f"{text!r} is not a list of positive numbers", "for example 0.5,1,2")
    return speeds


def _compare(
    trace: str, options: SimulationOptions, policies: Sequence[str], report: _Report
) -> dict[str, Any]:
    """Each policy's sustained rate, also on the hot trace, and runs at fractions of round-robin's rate."""
    by_policy = [options.model_copy(update={"policy": policy}) for policy in policies]
    hot = [one for one in by_policy if one.policy in ("kv", "prefix-affinity")]
    with Pool(_processes(), report.finished) as pool:
        searches = [(trace, one) for one in by_policy] + [(HOT_TRACE, one) for one in hot]
        rates = pool.sustained(searches)
        found = dict(zip(policies, rates, strict=False))
        hot_found = dict(zip([one.policy for one in hot], rates[len(policies) :], strict=True))
        base = found["round-robin"]
        runs = pool.all(
            [
                (trace, one.model_copy(update={"speed": share * base}))
                for share in _SHARES_OF_ROUND_ROBIN
                for one in by_policy
                if base
            ]
        )
    ratios = {f"kv/{other}": _ratio(found["kv"], found[other]) for other in policies if other != "kv"}
    ratios["hot"] = _ratio(hot_found["kv"], hot_found["prefix-affinity"])
    return {"runs": runs, "sustained": found, "sustained_hot": hot_found, "ratios": ratios}


def _autoscale(arguments: argparse.Namespace, options: SimulationOptions) -> int:
    with Pool(_processes(), _Report(sys.stderr).finished) as pool:
        found = compare(arguments.trace, options, pool.all)
    figures = json.dumps(found.figures) + "\n"
    sys.stdout.write(figures if arguments.json else comparison_table(found) + figures)
    if arguments.png is not None:
        from simulator.plot import draw_fleets  # imports matplotlib, which is optional

        draw_fleets(found, arguments.png)
    return 0


def _ratio(ours: float, theirs: float) -> float | None:
    """None: theirs is 0. JSON knows no infinity."""
    return ours / theirs if theirs else None


def _processes() -> int:
    return max(1, min(_PROCESSES, os.cpu_count() or 1))


class _Report:
    """Shows progress on stderr, and keeps the finished runs."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._lock = threading.Lock()
        self._runs: list[tuple[str, Summary]] = []
        self._whole = False  # a single run's end was shown

    def share(self, share: float) -> None:
        """Show the progress of a single run."""
        if self._whole:
            return
        self._whole = share >= 1
        end = "\n" if self._whole else ""
        if self._out.isatty():
            self._out.write(f"\r{share:4.0%}{end}")
        elif end:
            self._out.write("100%\n")
        self._out.flush()

    def finished(self, trace: str, summary: Summary, known: int) -> None:
        """Show that one of many runs is finished; so many are known of."""
        with self._lock:
            self._runs.append((trace, summary))
            self._out.write(
                f"run {len(self._runs):3d} of {known}  {Path(trace).name}  {summary.policy:<16} "
                f"speed {summary.speed:7.3f}  met {summary.attainment:6.1%}\n"
            )
            self._out.flush()

    def of(self, trace: str) -> list[Summary]:
        """The runs of one trace."""
        return [one for name, one in self._runs if name == trace]
