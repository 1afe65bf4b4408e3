"""What every bench shares: its command line, the machine, alternate measurement, the result line."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common.arguments import ExactParser

Sides = Mapping[str, Callable[[], float]]
"""By name, a function that measures once and returns the measurement (seconds, bytes/s, ...)."""


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser of a bench's options, with `--json`."""
    parser = ExactParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON")
    return parser


def machine() -> dict[str, Any]:
    """The properties of this machine that its figures depend on."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load_1m": round(os.getloadavg()[0], 2),  # other work on the machine makes absolute figures worse
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def alternate(sides: Sides, rounds: int) -> dict[str, list[float]]:
    """Measure every side once per round, in turn, so that a machine that slows down slows all of them."""
    measured: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, measure in sides.items():
            measured[name].append(measure())
    return measured


def medians(measured: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of each side."""
    return {name: statistics.median(values) for name, values in measured.items()}


def seconds(work: Callable[[], object]) -> float:
    """The time that `work` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def print_result(name: str, ratios: Mapping[str, Any], values: Mapping[str, Any], as_json: bool) -> None:
    """Print a bench's result: JSON with the keys that its docstring names, on one line or indented."""
    result = {"bench": name, "machine": machine(), "ratios": dict(ratios), "values": dict(values)}
    print(json.dumps(result, indent=None if as_json else 2), flush=True)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
