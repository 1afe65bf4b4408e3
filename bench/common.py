"""What every bench shares: the machine, alternate measurement, the result line."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Sides = Mapping[str, Callable[[], float]]
"""By name, a function that does one measurement and returns what it measured (seconds, bytes/s, ...)."""


def machine() -> dict[str, Any]:
    """What a reader must know of the machine to judge figures from it."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load_1m": round(os.getloadavg()[0], 2),  # others on the machine spoil absolute figures
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def alternate(sides: Sides, rounds: int) -> dict[str, list[float]]:
    """Measure every side once a round, in turn, so that a machine that slows down slows them all."""
    measured: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, measure in sides.items():
            measured[name].append(measure())
    return measured


def medians(measured: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of each side."""
    return {name: statistics.median(values) for name, values in measured.items()}


def seconds(work: Callable[[], object]) -> float:
    """How long `work` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def print_result(
    name: str, ratios: Mapping[str, Any], values: Mapping[str, Any], as_json: bool = True
) -> None:
    """A bench's last line: JSON with the keys that its documentation names; indented for a reader without
    `as_json`."""
    result = {"bench": name, "machine": machine(), "ratios": dict(ratios), "values": dict(values)}
    print(json.dumps(result, indent=None if as_json else 2), flush=True)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
