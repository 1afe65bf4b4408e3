"""`baton replay --autoscale slo`: what scaling on objectives saves, and what switching roles gains.

On TRACE, worker-hours at equal attainment: at least 95% of requests meet both objectives.
    fixed  the fixed prefill and decode workers that attain it with the fewest
    load   scaling by reported load; of all settings in LOAD_SWEEP the one that attains it in the fewest hours
    slo    scaling on objectives, as it is configured: it is not swept

On a trace whose mix shifts, goodput of a fixed number of workers:
    best fixed  every ratio of prefill to decode is tried
    switch      workers change their roles

In all of them a request whose first token would be late is refused (admission.max_ttft_s). That favours small
fleets: they lose only the requests that are too many. The router's limit of rooms is lifted.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from common.errors import ConfigError
from simulator.options import Autoscale, SimulationOptions
from simulator.summary import Summary

ATTAINED = 0.95
LOAD_SWEEP = {
    "target_load": (0.6, 0.7, 0.8),
    "upscale_delay_s": (0.0, 30.0),
    "downscale_delay_s": (60.0, 300.0),
}
SHIFT_WORKERS = 8
_MOST = 12  # fixed workers of a role
_ROOMS = 1 << 20

RunAll = Callable[[list[tuple[str, SimulationOptions]]], list[Summary]]


class Row(NamedTuple):
    """One fleet that was compared."""

    name: str
    setting: str
    summary: Summary


class Comparison(NamedTuple):
    """The best of each."""

    fixed: Row
    load: Row
    slo: Row
    best_ratio: Row
    switch: Row

    @property
    def figures(self) -> dict[str, dict[str, float]]:
        """The last line of the output."""
        scaled = (self.fixed, self.load, self.slo)
        return {
            "worker_hours": {one.name: round(one.summary.worker_hours, 3) for one in scaled},
            "attainment": {one.name: round(one.summary.attainment, 4) for one in scaled},
            "goodput": {
                "best_fixed": round(self.best_ratio.summary.goodput, 3),
                "switch": round(self.switch.summary.goodput, 3),
            },
        }


def compare(trace: str, options: SimulationOptions, run_all: RunAll) -> Comparison:
    """Run everything. `run_all` runs simulations, several at a time, and may be called by several threads."""
    admission = options.admission.model_copy(
        update={"max_in_flight": _ROOMS, "max_ttft_s": options.slo_ttft_s}
    )
    options = options.model_copy(update={"admission": admission})
    with ThreadPoolExecutor(1) as threads:
        shifting = threads.submit(_shifting, _shift_trace(trace), options, run_all)
        fixed = _cheapest_fixed(trace, options, run_all)
        started = _half(options, fixed.summary)
        load = _best_load(trace, started, run_all)
        (slo,) = run_all([(trace, _scaled(started, policy=Autoscale.SLO))])
        return Comparison(fixed, load, Row("slo", "not swept", slo), *shifting.result())


def _shift_trace(trace: str) -> str:
    """The shifting trace of the same seed; of seed 1 when TRACE is a file."""
    seed = trace.rpartition(":")[2]
    return f"shift:{seed if seed.isdecimal() else 1}"


def _half(options: SimulationOptions, fixed: Summary) -> SimulationOptions:
    """What is scaled begins with half of the fixed workers."""
    size = fixed.fleet[0]
    return _sized(options, -(-size.prefill // 2), -(-size.decode // 2))


def _scaled(options: SimulationOptions, **given: object) -> SimulationOptions:
    return options.model_copy(update={"scaling": options.scaling.model_copy(update=given)})


def _cheapest_fixed(trace: str, options: SimulationOptions, run_all: RunAll) -> Row:
    """Find the fewest workers of each role that attain with plenty of the other. Try all ratios of so many
    workers in all, of one more, and so on until one attains. Raises ConfigError when none does."""

    def run(*sizes: tuple[int, int]) -> list[Summary]:
        return run_all([(trace, _sized(options, *size)) for size in sizes])

    least_p = _fewest(lambda count: _attains(*run((count, _MOST))))
    least_d = _fewest(lambda count: _attains(*run((_MOST, count))))
    for total in range(least_p + least_d, 2 * _MOST + 1):
        sizes = [(count, total - count) for count in range(least_p, total - least_d + 1)]
        summary = max(run(*sizes), key=lambda one: one.attainment)
        if _attains(summary):
            return _fixed_row("fixed", summary)
    raise ConfigError(
        "TRACE", f"no fleet of up to {_MOST} + {_MOST} workers attains {ATTAINED:.0%}", "lower --speed"
    )


def _fewest(attains: Callable[[int], bool]) -> int:
    """The smallest count that attains, or `_MOST`."""
    return bisect.bisect_left(range(1, _MOST), True, key=attains) + 1


def _best_load(trace: str, options: SimulationOptions, run_all: RunAll) -> Row:
    settings = [
        dict(zip(LOAD_SWEEP, values, strict=True)) for values in itertools.product(*LOAD_SWEEP.values())
    ]
    summaries = run_all([(trace, _scaled(options, policy=Autoscale.LOAD, **one)) for one in settings])
    rows = [
        Row("load", ", ".join(f"{name} {value:g}" for name, value in one.items()), summary)
        for one, summary in zip(settings, summaries, strict=True)
    ]
    attained = [row for row in rows if _attains(row.summary)]
    if attained:
        return min(attained, key=lambda row: row.summary.worker_hours)
    return max(rows, key=lambda row: row.summary.attainment)


def _shifting(trace: str, options: SimulationOptions, run_all: RunAll) -> tuple[Row, Row]:
    """The best fixed ratio, and a fleet that begins with equal parts."""
    ratios = [_sized(options, count, SHIFT_WORKERS - count) for count in range(1, SHIFT_WORKERS)]
    equal = _sized(options, SHIFT_WORKERS // 2, SHIFT_WORKERS // 2)
    *fixed, switch = run_all([(trace, one) for one in (*ratios, _scaled(equal, switch_roles=True))])
    best = _fixed_row("best fixed", max(fixed, key=lambda one: one.goodput))
    return best, Row("switch", f"{SHIFT_WORKERS} workers", switch)


def _attains(summary: Summary) -> bool:
    return summary.attainment >= ATTAINED


def _sized(options: SimulationOptions, prefill: int, decode: int) -> SimulationOptions:
    return options.model_copy(update={"prefill": prefill, "decode": decode})


def _fixed_row(name: str, summary: Summary) -> Row:
    size = summary.fleet[0]
    return Row(name, f"{size.prefill} prefill, {size.decode} decode", summary)
