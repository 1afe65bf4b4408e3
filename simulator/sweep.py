"""Sweep: many runs on few processes, and the highest rate that a policy sustains.

Sustained rate: on a grid of speeds, each GRID_STEP times the last, the highest one reached going up from
FIRST before the first at which less than SHARE of the requests meet both objectives, refined by bisection to
REFINED; where FIRST fails already, going down from it to the first that does not. So where attainment is not
monotone, it is the first fall that counts: nobody would run beyond it.
"""

from __future__ import annotations

import functools
import multiprocessing
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
    """One run, in this process."""
    simulation = Simulation(_trace(trace), options)
    simulation.run(progress)
    return summarise(simulation, options)


@functools.cache
def _trace(name: str) -> Trace:
    return read_trace(name)


class Pool:
    """Runs on `processes` processes. Call from any thread; each call waits for its run."""

    def __init__(self, processes: int, finished: Callable[[str, Summary], None]) -> None:
        """`finished` is told the trace and the summary of every run, on the thread that wanted it."""
        spawn = multiprocessing.get_context("spawn")  # a fork would share this process's threads' locks
        self._processes = ProcessPoolExecutor(processes, spawn)
        self._finished = finished

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._processes.shutdown(cancel_futures=True)

    def run(self, trace: str, options: SimulationOptions) -> Summary:
        """One run."""
        summary = self._processes.submit(run_once, trace, options).result()
        self._finished(trace, summary)
        return summary

    def all(self, wanted: list[tuple[str, SimulationOptions]]) -> list[Summary]:
        """Many, in that order."""
        with ThreadPoolExecutor(max(1, len(wanted))) as threads:
            return list(threads.map(lambda one: self.run(*one), wanted))

    def sustained(self, wanted: list[tuple[str, SimulationOptions]]) -> list[float]:
        """The sustained rate of each; their own speeds do not matter."""
        with ThreadPoolExecutor(max(1, len(wanted))) as threads:
            return list(threads.map(lambda one: sustained(self.run, *one), wanted))


def sustained(run: Run, trace: str, options: SimulationOptions) -> float:
    """See the module. 0 when nothing above LOWEST passes, the greatest tried when all below HIGHEST do."""

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
