"""The figures of a worker that its record carries, for operators."""

from __future__ import annotations

from kvcache.memory import Memory
from scheduler.metrics import SchedulerMetrics
from wire.records import Counts, GroupPages, WorkerFigures


def worker_figures(memory: Memory, metrics: SchedulerMetrics) -> WorkerFigures:
    """Read on the engine loop, several times a second."""
    tree = memory.cache.tree
    return WorkerFigures(
        groups={
            name: GroupPages(
                total=allocator.num_pages,
                free=allocator.available_pages(),
                evictable=tree.evictable(name),
                evicted=allocator.evicted,
            )
            for name, allocator in memory.allocators.items()
        },
        forwards=metrics.steps,
        histograms={
            name: Counts(histogram.bounds, tuple(histogram.counts), histogram.total)
            for name, histogram in (
                ("forward_seconds", metrics.forward_seconds),
                ("batch_sequences", metrics.batch_sequences),
                ("batch_tokens", metrics.batch_tokens),
            )
        },
        cached_tokens=metrics.cached_tokens,
        output_tokens=metrics.output_tokens,
        finished=metrics.finished,
        failed=metrics.failed,
        aborted=metrics.aborted,
        retracted=metrics.retracted,
    )
