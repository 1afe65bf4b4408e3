"""Measures the router's index: ingest of events, match and placement of a prompt, memory of a page.

    python -m bench.index [--json] [--rounds N] [--churn BLOCKS_PER_S]

Each of 64 workers holds 104 of 1,600 sequences. A sequence is 2,048 tokens (128 pages of 16), and its first
half is one of 40 shared prefixes. All that is timed runs on one core; another process publishes from another
core.

- ingest_blocks_s: everything through 64 real sockets into the event plane and the index, in the form of
  Baton's publisher (one BlockStored per inserted node). ingest_per_page_blocks_s: one BlockStored per page,
  and one batch per node. ingest_foreign_blocks_s: hashes of another engine, so pages are hashed from
  token_ids. ingest_in_process_blocks_s: Baton's form without sockets.
- find_*_us: the match of 128 ready page hashes against all workers, for sequences in random order, while the
  workers evict and insert again at `--churn` blocks per second (*_churn_blocks_s: the rate that they
  reached). find_idle_p50_us: the same with 100 us of sleep before each match, so that caches are cold.
- select_*_us: the choice of (P, D) among 32 prefill and 32 decode workers with policy `kv` for the same
  hashes, and its placement, under the same churn.
- bytes_per_block: growth of a process per different page; bytes_per_held_block: per page and worker.

When NVIDIA Dynamo is installed, `dynamo_*` are measured alternately in the same run:

    pip install ai-dynamo-runtime==1.6.1

SelectionService follows the same sockets. It always hashes the tokens itself, and selects one worker, not a
pair. RadixTree is filled in process (dynamo_ingest_in_process_blocks_s), matched, and measured for memory.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import ModuleType

import numpy as np

from bench import index_baton, index_memory
from bench.common import alternate, medians, print_result
from bench.index_dynamo import DynamoService, DynamoTree, dynamo
from bench.index_load import Form, Load, Shape
from bench.index_publisher import Remote, publisher
from common.arguments import ExactParser

FINDS = 10_000
SELECTS = 2_000
IDLE_FINDS = 2_000
IDLE_S = 1e-4


class Timed:
    """Times a call for many sequences, under churn, in rounds. Keeps every sample."""

    def __init__(
        self,
        one: Callable[[int], float],
        count: int,
        start_churn: Callable[[], None] = lambda: None,
        stop_churn: Callable[[], int] = lambda: 0,
        pause_s: float | None = None,
    ) -> None:
        self._one, self._count, self._pause_s = one, count, pause_s
        self._start_churn, self._stop_churn = start_churn, stop_churn
        self._random = np.random.default_rng(7)
        self.samples: list[float] = []
        self.churn_blocks_s: list[float] = []

    def __call__(self) -> float:
        """Run one round. Returns its median in seconds."""
        sequences = self._random.integers(0, Shape().sequences, self._count).tolist()
        started = time.perf_counter()
        self._start_churn()
        new = []
        for sequence in sequences:
            if self._pause_s is not None:
                time.sleep(self._pause_s)
            new.append(self._one(sequence))
        took = time.perf_counter() - started
        self.churn_blocks_s.append(self._stop_churn() / took)
        self.samples += new
        return float(np.median(new))

    def percentile_us(self, percent: float) -> float:
        """A percentile over all rounds, in microseconds."""
        return round(float(np.percentile(self.samples, percent)) * 1e6, 2)


def time_ingest(load: Load, remote: Remote, core: ModuleType | None, rounds: int) -> dict[str, float]:
    """Measure ingest. Returns blocks per second, by key of `values`."""
    forms = {"ingest": Form.NODE, "ingest_per_page": Form.PAGE, "ingest_foreign": Form.EXTERNAL}
    sides: dict[str, Callable[[], float]] = {}
    for name, form in forms.items():
        sides[f"{name}_blocks_s"] = partial(index_baton.ingest, load, remote, form)
        if core is not None and form != Form.EXTERNAL:
            sides[f"dynamo_{name}_blocks_s"] = partial(_dynamo_ingest, core, load, remote, form)
    sides["ingest_in_process_blocks_s"] = partial(index_baton.ingest_in_process, load)
    if core is not None:
        sides["dynamo_ingest_in_process_blocks_s"] = lambda: DynamoTree(core, load).fill()
    return {name: round(value) for name, value in medians(alternate(sides, rounds)).items()}


def _dynamo_ingest(core: ModuleType, load: Load, remote: Remote, form: Form) -> float:
    remote.call("prepare", form)
    service = DynamoService(core, load, remote)
    try:
        return service.fill(form)
    finally:
        service.close()


def time_calls(
    load: Load, remote: Remote, peer: Remote, core: ModuleType | None, rounds: int, churn: float
) -> dict[str, float]:
    """Measure find and select. Returns microseconds, by key of `values`."""
    with ExitStack() as stack:
        filled = stack.enter_context(index_baton.filled(load, remote))
        selector = index_baton.Selector(load, filled)
        ours = (lambda: remote.start("churn", churn), remote.stop_churn)
        timed = {
            "find": Timed(lambda at: index_baton.find(filled, load, at), FINDS, *ours),
            "select": Timed(selector.select, SELECTS, *ours),
        }
        idle = Timed(lambda at: index_baton.find(filled, load, at), IDLE_FINDS, *ours, pause_s=IDLE_S)
        if core is not None:
            tree = DynamoTree(core, load)
            tree.fill()
            timed["dynamo_find"] = Timed(tree.find, FINDS, lambda: tree.churn(churn), tree.stop_churn)
            peer.call("prepare", Form.NODE)
            service = DynamoService(core, load, peer)
            stack.callback(service.close)
            service.fill(Form.NODE)
            service.prepare_select()
            theirs = (lambda: peer.start("churn", churn), peer.stop_churn)
            timed["dynamo_select"] = Timed(service.select, SELECTS, *theirs)
        alternate({**timed, "idle": idle}, rounds)
    values = {}
    for name, one in timed.items():
        values[f"{name}_p50_us"], values[f"{name}_p99_us"] = one.percentile_us(50), one.percentile_us(99)
        values[f"{name}_churn_blocks_s"] = round(float(np.median(one.churn_blocks_s)))
    return {**values, "find_idle_p50_us": idle.percentile_us(50)}


def weigh(core: ModuleType | None) -> dict[str, float]:
    """Measure memory. Returns bytes, by key of `values`."""
    values = {}
    for prefix, side in {"": "baton", "dynamo_": "dynamo"}.items():
        if side == "baton" or core is not None:
            memory = index_memory.measure(side)
            values[f"{prefix}bytes_per_block"] = round(memory.per_page, 1)
            values[f"{prefix}bytes_per_held_block"] = round(memory.per_held_page, 1)
    return values


def main() -> None:
    """Measure everything, and print the result."""
    parser = ExactParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="the result as one line")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--churn", type=float, default=100_000.0, help="blocks per second while others are timed"
    )
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])  # before any thread is started: all of them stay on it
    core = dynamo()
    load = Load(Shape())
    with publisher(load.shape, {cores[-1]}) as remote, publisher(load.shape, {cores[-1]}) as peer:
        values = time_ingest(load, remote, core, arguments.rounds)
        values |= time_calls(load, remote, peer, core, arguments.rounds, arguments.churn)
    values |= weigh(core)
    ratios = {}
    if core is not None:
        for name in ("ingest_blocks_s", "ingest_per_page_blocks_s"):
            ratios[f"{name}_vs_dynamo"] = round(values[name] / values[f"dynamo_{name}"], 2)
        for name in ("find_p50_us", "select_p50_us", "bytes_per_block"):
            ratios[f"dynamo_{name}_vs_ours"] = round(values[f"dynamo_{name}"] / values[name], 2)
    print_result("index", ratios, values, arguments.json)


if __name__ == "__main__":
    main()
