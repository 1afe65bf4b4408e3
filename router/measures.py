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


class Observed:
    """What a histogram has counted for one value of its labels."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: list[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last is of values above all bounds
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class Distribution(Collector):
    """A histogram; with `labels`, one for each of their values."""

    def __init__(
        self, registry: CollectorRegistry, name: str, about: str, bounds: Sequence[float], *labels: str
    ) -> None:
        """`bounds` are the buckets' upper bounds, inclusive and increasing; +Inf is added."""
        self._named = name, about, labels
        self._bounds = list(bounds)
        self._observed: dict[tuple[str, ...], Observed] = {}
        if not labels:
            self.at()
        registry.register(self)

    def at(self, *of: str) -> Observed:
        """Of these labels' values, from now on there. To be kept by who observes often."""
        return self._observed.setdefault(of, Observed(self._bounds))

    def observe(self, value: float, *of: str) -> None:
        """Count one value. `of` are the labels' values."""
        (self._observed.get(of) or self.at(*of)).observe(value)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        name, about, labels = self._named
        family = HistogramMetricFamily(name, about, labels=labels)
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        for of, observed in self._observed.items():
            buckets = list(zip(bounds, accumulate(observed.counts), strict=True))
            family.add_metric(of, buckets, observed.total)
            if self._bounds[0] < 0:  # the family leaves out the sum, which may fall, and the count with it
                family.add_sample(f"{name}_count", dict(zip(labels, of, strict=True)), buckets[-1][1])
        yield family
