"""ServeLoadPolicy: scaling by reported load, with the window and the delays that Ray Serve adds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from scaling.load import load_share
from scaling.target import workers_for_load
from simulator.options import ScalingOptions
from wire.records import WorkerLoad, WorkerRecord

_PREFILL_TOKENS = 8192  # max_prefill_tokens of a worker by default: the queue that is a load of 1


class ServeLoadPolicy:
    """For one role. As in Serve, the number changes once it has been too low, or too high, for a delay."""

    def __init__(self, options: ScalingOptions) -> None:
        self._options = options
        self._seen: dict[str, deque[tuple[float, float]]] = {}  # worker -> (when, load), in the window
        self._direction = 0  # of the change that is wanted: up, none or down
        self._since = 0.0  # when it was first wanted

    def target(
        self, records: Sequence[WorkerRecord], loads: Mapping[str, WorkerLoad], now: float, current: int
    ) -> int:
        """The workers to have. `current` counts those that are starting, too; `records` does not."""
        means = [self._mean(replace(one, load=loads[one.id]), now) for one in records]
        for gone in self._seen.keys() - loads.keys():
            del self._seen[gone]
        wanted = workers_for_load(means, self._options.target_load) if means else current
        direction = (wanted > current) - (wanted < current)
        if direction != self._direction:
            self._direction, self._since = direction, now
        options = self._options
        delay_s = options.upscale_delay_s if direction > 0 else options.downscale_delay_s
        if now - self._since < delay_s:
            return current
        self._direction = 0
        return wanted

    def _mean(self, record: WorkerRecord, now: float) -> float:
        """The worker's mean load over the window."""
        seen = self._seen.setdefault(record.id, deque())
        seen.append((now, load_share(record, _PREFILL_TOKENS)))
        while seen[0][0] < now - self._options.look_back_s:
            seen.popleft()
        return sum(load for _, load in seen) / len(seen)
