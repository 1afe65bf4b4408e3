"""MergedMetrics: the metrics of several router processes as those of one router."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

# Each process follows the same workers and events, and has the other processes as peers. So of these metrics
# the greatest is right; other gauges, counters and histograms are of each process alone, and are added. Each
# has suspicions of its own, too, but mostly of the same workers.
_SAME_IN_EACH = frozenset(
    {
        "baton_router_workers",
        "baton_router_version_share",
        "baton_router_index_pages",
        "baton_router_peers",
        "baton_router_suspected",
    }
)
_OF_WORKERS = "baton_worker_"  # so are all that begin with it


_Series = tuple[str, tuple[tuple[str, str], ...]]  # name, labels


class MetricFamily(msgspec.Struct, array_like=True):
    """A metric as one process, or several together, have measured it."""

    name: str
    about: str
    kind: str  # "counter", "gauge" or "histogram"
    samples: list[tuple[str, dict[str, str], float]]  # name, labels, value


class MergedMetrics:
    """What the other processes said last. No sum falls when one of them ends, or does not answer in time."""

    def __init__(self) -> None:
        self._last: dict[str, list[MetricFamily]] = {}  # by process
        self._ended: list[MetricFamily] = []  # counters and histograms of processes that have ended

    def take(self, process: str, said: list[MetricFamily]) -> None:
        """A process has said what it measured so far."""
        self._last[process] = said

    def end(self, process: str) -> None:
        """A process has ended. What it counted remains."""
        counted = [
            family
            for family in self._last.pop(process, [])
            if family.kind != "gauge" and not _is_same(family.name)
        ]
        self._ended = merge([self._ended, counted])

    def parts(self, own: list[MetricFamily]) -> list[list[MetricFamily]]:
        """What is to be merged. `own` is of the process that asks. It does not change any more."""
        return [own, self._ended, *self._last.values()]


def collect(registry: CollectorRegistry) -> list[MetricFamily]:
    """What a process has measured."""
    return [
        MetricFamily(
            metric.name,
            metric.documentation,
            metric.type,
            [(sample.name, sample.labels, sample.value) for sample in metric.samples],
        )
        for metric in registry.collect()
    ]


def merge(processes: Iterable[list[MetricFamily]]) -> list[MetricFamily]:
    """The same metrics, measured by several processes, as one."""
    merged: dict[str, tuple[MetricFamily, dict[_Series, float]]] = {}
    for family in chain.from_iterable(processes):
        _, values = merged.setdefault(family.name, (family, {}))
        for name, labels, value in family.samples:
            series = name, tuple(labels.items())
            if series not in values:
                values[series] = value
            elif _is_same(family.name):
                values[series] = max(values[series], value)
            else:
                values[series] += value
    return [
        MetricFamily(
            first.name,
            first.about,
            first.kind,
            [(name, dict(labels), value) for (name, labels), value in values.items()],
        )
        for first, values in merged.values()
    ]


def _is_same(name: str) -> bool:
    return name in _SAME_IN_EACH or name.startswith(_OF_WORKERS)


def exposition(families: list[MetricFamily]) -> bytes:
    """The Prometheus text format."""
    return generate_latest(_Families(families))


class _Families(Collector):
    def __init__(self, families: list[MetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.about, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, labels, value)
            yield metric
