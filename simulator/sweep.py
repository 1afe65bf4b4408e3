"""Runs many simulations on few processes, and finds the highest speed that a policy sustains.

A speed passes when at least SHARE of the requests meet both objectives. From FIRST the speed is multiplied by
GRID_STEP until one fails (or, if FIRST fails, divided until one passes). Bisection between the last that
passed and the first that failed gives the sustained rate, within a factor of REFINED. So if attainment is not
monotone, the first failure counts.
"""

from __future__ import annotations

import functools
import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from types import TracebackType

from simulator.options import SimulationOptions
from simulator.simulation import Simulation, Trace
from simulator.summary import Summary, summarise
from simulator.traces import read_trace

SHARE = 0.9
FIRST = 0.5
LOWEST = 0.01
GRID_STEP = 2**0.5
HIGHEST = 256.0
REFINED = 1.02

Run = Callable[[str, SimulationOptions], Summary]


def run_once(
    trace: str, options: SimulationOptions, progress: Callable[[float], None] = lambda _share: None
) -> Summary:
    """Run one simulation in this process."""
    simulation = Simulation(_trace(trace), options)
    simulation.run(progress)
    return summarise(simulation, options)


@functools.cache
def _trace(name: str) -> Trace:
    return read_trace(name)


class Pool:
    """Runs simulations on several processes. Any thread may call it; each call waits for its run."""

    def __init__(self, processes: int, finished: Callable[[str, Summary, int], None]) -> None:
        """`finished` is called on the thread that started a run, with its trace, its summary, and how many
        runs are known of by then: a search begins one when it knows the result of the last."""
        spawn = multiprocessing.get_context("spawn")  # a fork would copy locks that other threads hold
        self._processes = ProcessPoolExecutor(processes, spawn)
        self._finished = finished
        self._known = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._processes.shutdown(cancel_futures=True)

    def run(self, trace: str, options: SimulationOptions) -> Summary:
        """Run one simulation."""
        self._know(1)
        return self._run(trace, options)

    def _run(self, trace: str, options: SimulationOptions) -> Summary:
        summary = self._processes.submit(run_once, trace, options).result()
        self._finished(trace, summary, self._known)
        return summary

    def _know(self, more: int) -> None:
        with self._lock:
            self._known += more

    def all(self, wanted: list[tuple[str, SimulationOptions]]) -> list[Summary]:
        """Run many simulations. Returns their summaries in the same order."""
        with ThreadPoolExecutor(max(1, len(wanted))) as threads:
            self._know(len(wanted))
            return list(threads.map(lambda one: self._run(*one), wanted))

    def sustained(self, wanted: list[tuple[str, SimulationOptions]]) -> list[float]:
        """Find the sustained rate of each. The speeds in the options are ignored."""
        with ThreadPoolExecutor(max(1, len(wanted))) as threads:
            return list(threads.map(lambda one: sustained(self.run, *one), wanted))


def sustained(run: Run, trace: str, options: SimulationOptions) -> float:
    """Find the sustained rate. It is 0 if no speed above LOWEST passes; the search ends at HIGHEST."""

    def passes(speed: float) -> bool:
        return run(trace, options.model_copy(update={"speed": speed})).attainment >= SHARE

    good, bad = FIRST, FIRST
    while bad < HIGHEST and passes(bad):
        good, bad = bad, bad * GRID_STEP
    if bad >= HIGHEST:
        return good
    if bad == FIRST:
        good = FIRST / GRID_STEP
        while not passes(good):
            good, bad = good / GRID_STEP, good
            if good < LOWEST:
                return 0.0
    while bad / good > REFINED:
        middle = (good * bad) ** 0.5
        good, bad = (middle, bad) if passes(middle) else (good, middle)
    return good
