"""The figures of a worker that its record carries, for operators."""

from __future__ import annotations

from kvcache.memory import Memory
from scheduler.metrics import SchedulerMetrics
from wire.records import GroupPages, WorkerFigures


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
        forward_s=metrics.forward_s,
        sequences=int(metrics.batch_sequences.total),
        cached_tokens=metrics.cached_tokens,
        output_tokens=metrics.output_tokens,
        finished=metrics.finished,
        failed=metrics.failed,
        aborted=metrics.aborted,
        retracted=metrics.retracted,
    )
