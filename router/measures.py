"""Counters and histograms of one thread, read when Prometheus asks.

prometheus_client's own take a lock and look a label up for each update, which cost the router a twentieth of
its time. Its names, types and exposition are kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString


class Count(Collector):
    """A counter; with `labels`, one for each of their values."""

    def __init__(self, registry: CollectorRegistry, name: str, about: str, *labels: str) -> None:
        """`name` is without the suffix `_total`."""
        self._named = name, about, labels
        self._counts: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}
        registry.register(self)

    def inc(self, by: float, *of: str) -> None:
        """Add `by`. `of` are the labels' values."""
        self._counts[of] = self._counts.get(of, 0.0) + by

    def begin(self, *of: str) -> None:
        """There is a series of these labels' values, even if nothing is counted."""
        self.inc(0.0, *of)

    def collect(self) -> Iterator[CounterMetricFamily]:
        name, about, labels = self._named
        family = CounterMetricFamily(name, about, labels=labels)
        for of, count in self._counts.items():
            family.add_metric(of, count)
        yield family


class Distribution(Collector):
    """A histogram; with `labels`, one for each of their values."""

    def __init__(
        self, registry: CollectorRegistry, name: str, about: str, bounds: Sequence[float], *labels: str
    ) -> None:
        """`bounds` are the buckets' upper bounds, inclusive and increasing; +Inf is added."""
        self._named = name, about, labels
        self._bounds = list(bounds)
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        if not labels:
            self.begin()
        registry.register(self)

    def observe(self, value: float, *of: str) -> None:
        """Count one value. `of` are the labels' values."""
        counts = self._counts.get(of) or self.begin(*of)
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[of] += value

    def begin(self, *of: str) -> list[int]:
        """The counts of these labels' values, all 0: none was observed yet."""
        counts = self._counts[of] = [0] * (len(self._bounds) + 1)
        self._sums[of] = 0.0
        return counts

    def collect(self) -> Iterator[HistogramMetricFamily]:
        name, about, labels = self._named
        family = HistogramMetricFamily(name, about, labels=labels)
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        for of, counts in self._counts.items():
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric(of, buckets, self._sums[of])
            if self._bounds[0] < 0:  # the family leaves out the sum, which may fall, and the count with it
                family.add_sample(f"{name}_count", dict(zip(labels, of, strict=True)), buckets[-1][1])
        yield family
