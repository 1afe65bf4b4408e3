"""Scaling prefill and decode workers by the load that they report.

Serve scales by the requests that it counts, and it counts none of those that reach workers over ZeroMQ. So
each replica reports its load through Serve's `record_autoscaling_stats` hook, and this policy turns the sum
into a number of replicas. Bounds, delays and factors are Serve's own (AutoscalingConfig).

Serve pickles this module by value into its controller, so it imports nothing heavy.
"""

from __future__ import annotations

import math
from typing import Any

from ray.serve.config import AutoscalingContext

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
        # Rounded first: 0.7 + 0.7 over 0.7 must be 2 replicas, not 3.
        return max(1, math.ceil(round(sum(loads.values()) / self._target_load, 6))), {}
