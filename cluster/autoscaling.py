"""Scaling prefill and decode workers, by the load that they report or on an objective.

Serve scales by the requests that it counts, and it counts none of those that reach workers over ZeroMQ. So
each replica reports figures through Serve's `record_autoscaling_stats` hook, and these policies turn them
into a number of replicas. Bounds and factors are Serve's own (AutoscalingConfig), and LoadPolicy's delays.

Serve pickles this module by value into its controller, where Baton need not be installed. `scaling` is
pickled by value, too, so the parts of it that are used here import the standard library only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ray import cloudpickle
from ray.serve.config import AutoscalingContext

import scaling
from scaling.demand import DecodeDemand, Demand, PrefillDemand
from scaling.fleet import FleetDemand
from scaling.objective import ObjectiveScaler
from scaling.sample import WorkerSample
from scaling.target import workers_for_load

cloudpickle.register_pickle_by_value(scaling)

LOAD = "load"
"""Name of the reported figure: the share of one worker's capacity in use; above 1, requests wait."""


class LoadPolicy:
    """As many replicas as bring the mean load to `target_load`."""

    def __init__(self, target_load: float) -> None:
        self._target_load = target_load

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The wanted number of replicas, and no state. The number stays while a replica has not reported: it
        may be loading."""
        loads = (context.aggregated_metrics or {}).get(LOAD, {})
        if not loads or len(loads) < context.current_num_replicas:
            return context.target_num_replicas, {}
        return workers_for_load(loads.values(), self._target_load), {}


class ObjectivePolicy:
    """As many replicas as meet the objective of their role, or of both if they change it
    (scaling/objective.py).

    Serve keeps one instance per deployment, so forecasts stay here and not in the state that Serve would
    copy. A controller that restarts forgets them, and scales nothing down for `hold_s` seconds.
    """

    def __init__(
        self,
        ttft_s: float | None,
        itl_s: float | None,
        start_s: float,
        hold_s: float,
        period_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prefill replicas have a TTFT as their objective, decode replicas an ITL, and those that change
        their roles both. A new replica serves after `start_s`. Decisions are `period_s` seconds apart.

        Serve's own `current_time` is the wall clock, which may be set while the controller runs.
        """
        self._scaler = ObjectiveScaler(_demand(ttft_s, itl_s), start_s, hold_s)
        self._period_s = period_s
        self._clock = clock
        self._next_at = 0.0
        self._target = 0

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The wanted number of replicas, and no state. Without any report the number stays."""
        now = self._clock()
        if now >= self._next_at and (samples := _samples(context)):
            self._next_at = now + self._period_s
            self._target = self._scaler.target(samples, now, context.target_num_replicas)
        return self._target or context.target_num_replicas, {}


def _demand(ttft_s: float | None, itl_s: float | None) -> Demand:
    prefill = None if ttft_s is None else PrefillDemand(ttft_s)
    decode = None if itl_s is None else DecodeDemand(itl_s)
    one = prefill or decode
    assert one is not None, "there is an objective"
    return FleetDemand(prefill, decode) if prefill and decode else one


def _samples(context: AutoscalingContext) -> dict[str, WorkerSample]:
    """The sample of each replica that has reported all figures. The figures are means over Serve's window:
    totals lag behind by half of it, and grow as fast."""
    metrics = context.aggregated_metrics or {}
    names = WorkerSample.__slots__
    replicas = set.intersection(*(set(metrics.get(name, {})) for name in names))
    return {
        str(replica): WorkerSample(**{name: metrics[name][replica] for name in names}) for replica in replicas
    }
