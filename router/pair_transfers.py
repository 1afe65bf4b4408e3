"""KV between two workers, for Prometheus: which pairs move how much, and how fast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry


@dataclass(slots=True)
class _Moved:
    nbytes: int = 0
    seconds: float = 0.0
    rooms: int = 0


class PairTransfers(Collector):
    """Counters of each pair of live workers. A pair that is gone and comes back begins anew."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._pairs: dict[tuple[str, str], _Moved] = {}
        registry.register(self)

    def observe(self, prefill: str, decode: str, nbytes: int, seconds: float) -> None:
        """A room's KV has come, in so many seconds with a write in progress."""
        moved = self._pairs.setdefault((prefill, decode), _Moved())
        moved.nbytes += nbytes
        moved.seconds += seconds
        moved.rooms += 1

    def gone(self, worker: str) -> None:
        """A worker is gone, or suspected of it: its pairs are forgotten, so that there are never more than
        live pairs."""
        for pair in [pair for pair in self._pairs if worker in pair]:
            del self._pairs[pair]

    def collect(self) -> Iterator[CounterMetricFamily]:
        nbytes, seconds, rooms = (
            CounterMetricFamily(f"baton_router_pair_transfer_{name}", about, labels=["prefill", "decode"])
            for name, about in (
                ("bytes", "KV bytes from one worker to another"),
                ("seconds", "Seconds in which those bytes were written"),
                ("rooms", "Rooms whose KV that was"),
            )
        )
        for pair, moved in self._pairs.items():
            nbytes.add_metric(pair, moved.nbytes)
            seconds.add_metric(pair, moved.seconds)
            rooms.add_metric(pair, moved.rooms)
        yield from (nbytes, seconds, rooms)
