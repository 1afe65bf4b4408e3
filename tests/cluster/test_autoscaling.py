"""LoadPolicy: how many replicas for the loads that were reported."""

from __future__ import annotations

from typing import Any

import pytest
from ray.serve.config import AutoscalingContext

from cluster.autoscaling import LOAD, LoadPolicy


def _context(loads: dict[str, float], running: int, target: int) -> AutoscalingContext:
    fields: dict[str, Any] = dict.fromkeys(
        (
            "deployment_id",
            "deployment_name",
            "app_name",
            "running_replicas",
            "total_num_requests",
            "total_queued_requests",
            "raw_metrics",
            "last_scale_up_time",
            "last_scale_down_time",
            "current_time",
            "config",
        )
    )
    return AutoscalingContext(
        **fields,
        current_num_replicas=running,
        target_num_replicas=target,
        aggregated_metrics={LOAD: loads},
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=10,
        policy_state={},
    )


@pytest.mark.parametrize(
    ("loads", "running", "target", "wanted"),
    [
        ({"a": 0.0}, 1, 1, 1),  # never to zero: a scaled-down worker takes its cache with it
        ({"a": 0.7, "b": 0.7}, 2, 2, 2),  # exactly at the target
        ({"a": 0.8, "b": 0.8}, 2, 2, 3),
        ({"a": 2.8}, 1, 1, 4),
        ({"a": 0.1, "b": 0.1, "c": 0.1}, 3, 3, 1),
        ({"a": 0.1}, 2, 2, 2),  # one has not reported yet: change nothing
        ({}, 0, 2, 2),
    ],
)
def test_replicas_follow_the_sum_of_loads(
    loads: dict[str, float], running: int, target: int, wanted: int
) -> None:
    assert LoadPolicy(target_load=0.7)(_context(loads, running, target)) == (wanted, {})
