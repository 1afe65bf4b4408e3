"""LoadPolicy: how many replicas for the loads that were reported."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from ray.serve.config import AutoscalingContext, AutoscalingPolicy

from cluster.autoscaling import LOAD, LoadPolicy, ObjectivePolicy
from scaling.sample import WorkerSample


def _context(loads: dict[str, float], running: int, target: int) -> AutoscalingContext:
    return _reported({LOAD: loads}, running, target)


def _reported(
    metrics: dict[str, dict[str, float]], running: int, target: int, wall: float = 1e9
) -> AutoscalingContext:
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
            "config",
        )
    )
    return AutoscalingContext(
        **fields,
        current_num_replicas=running,
        target_num_replicas=target,
        aggregated_metrics=metrics,
        current_time=wall,
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


def _prefill(at: float, tokens_per_s: float, workers: int) -> dict[str, dict[str, float]]:
    """What prefill workers report that share this work, in prompts of 4,000 tokens."""
    tokens = tokens_per_s * at / workers
    sample = WorkerSample(prompts=tokens / 4000, prefilled_tokens=tokens, prefill_tokens_per_s=20_000.0)
    return {
        name: {f"w{number}": value for number in range(workers)} for name, value in asdict(sample).items()
    }


class Clock:
    """Stands in for the monotonic clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _policy(clock: Clock, itl_s: float | None = None, hold_s: float = 60.0) -> ObjectivePolicy:
    return ObjectivePolicy(2.0, itl_s, start_s=60.0, hold_s=hold_s, period_s=10.0, clock=clock)


def test_replicas_follow_what_arrives() -> None:
    clock, target = Clock(), 2
    policy = _policy(clock)
    for at in range(0, 200, 10):
        clock.now = float(at)
        target, state = policy(_reported(_prefill(clock.now, 100_000.0, 5), 5, max(5, target)))
    assert (target, state) == (6, {})
    clock.now += 1.0
    again, _ = policy(_reported({}, 5, 6))
    assert again == 6, "between two decisions, and without a report, the number stays"


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_a_step_of_the_wall_clock_changes_nothing(step_s: float) -> None:
    clock, target, targets = Clock(), 5, []
    policy = _policy(clock, hold_s=600.0)
    tokens = 0.0
    for turn in range(150):
        clock.now, tokens_per_s = 10.0 * turn, 100_000.0 if turn < 120 else 200_000.0
        wall = 1e9 + clock.now + (step_s if turn >= 100 else 0.0)
        target, _ = policy(_reported(_prefill(1.0, tokens, 5), 5, target, wall))
        targets.append(target)
        tokens += 10.0 * tokens_per_s
    assert targets[50:120] == [6] * 70
    assert targets[-1] > 10, "it goes on to follow the load"


def test_a_total_is_what_both_roles_need() -> None:
    def total(prompt_tokens_per_s: float, tokens_per_s: float) -> int:
        clock, target = Clock(), 4
        policy = _policy(clock, itl_s=0.05)
        for at in range(0, 400, 10):
            clock.now = float(at)
            prefill = WorkerSample(
                prompts=prompt_tokens_per_s * at / 2 / 4000, prefilled_tokens=prompt_tokens_per_s * at / 2,
                prefill_tokens_per_s=20_000.0, prefills=1.0, rows=4.0, step_s=0.5,
            )  # fmt: skip
            decode = WorkerSample(
                decoded_tokens=tokens_per_s * at / 2, rows=tokens_per_s * 0.02 / 2, step_s=0.02, share=0.5,
            )  # fmt: skip
            samples = {"a": prefill, "b": prefill, "c": decode, "d": decode}
            metrics = {
                name: {worker: getattr(one, name) for worker, one in samples.items()}
                for name in WorkerSample.__slots__
            }
            target, _ = policy(_reported(metrics, 4, target))
        return target

    assert total(100_000.0, 0.0) == 7, "6 prefill, as above, and one decodes"
    assert total(100_000.0, 2000.0) == 8, "two decode workers are half full, and one would be full"
    assert total(0.0, 0.0) == 2, "one in each role"


def test_a_total_does_not_follow_a_change_of_role() -> None:
    """Three of four workers decode, and one of those begins to prefill after 300 s: its totals begin again.
    Serve reports means over 30 s, which fall in steps from hours of work."""
    clock, target, targets = Clock(), 4, []
    policy = _policy(clock, itl_s=0.05)
    seen: list[dict[str, WorkerSample]] = []
    for at in range(0, 600, 10):
        clock.now = float(at)
        late = max(0, at - 300)
        tokens = 10_000.0 * (at - late) + 5000.0 * late
        first = WorkerSample(
            prompts=tokens / 4000, prefilled_tokens=tokens,
            prefill_tokens_per_s=20_000.0, prefills=1.0, rows=2.0,
        )  # fmt: skip
        decode = WorkerSample(
            decoded_tokens=1e7 + 500.0 * (at - late) + 750.0 * late,
            rows=15.0 if late else 10.0, step_s=0.02, share=0.45 if late else 0.3,
        )  # fmt: skip
        second = replace(first, prompts=late * 1.25, prefilled_tokens=late * 5000.0) if late else decode
        seen.append({"a": first, "b": second, "c": decode, "d": decode})
        metrics = {
            name: {one: fmean(getattr(past[one], name) for past in seen[-3:]) for one in "abcd"}
            for name in WorkerSample.__slots__
        }
        target, _ = policy(_reported(metrics, 4, target))
        targets.append(target)
    assert targets[25] == 3, "one prefills, and 30 rows are not more than two workers hold"
    assert set(targets[25:]) <= {2, 3, 4}


def test_the_number_stays_until_replicas_report() -> None:
    assert _policy(Clock())(_reported({}, 0, 3)) == (3, {})
    assert _policy(Clock())(_reported({LOAD: {"a": 0.1}}, 1, 3)) == (3, {}), "an older version's report"


_IN_THE_CONTROLLER = """
import sys
from ray import cloudpickle
policy = cloudpickle.load(sys.stdin.buffer)
objective = policy(2.0, 0.05, 60.0, 60.0, 10.0)
class Context:
    aggregated_metrics, current_time, current_num_replicas, target_num_replicas = {}, 1.0, 1, 3
assert objective(Context()) == (3, {})
Context.aggregated_metrics = {name: {"a": 1.0} for name in sys.argv[1].split(",")}
assert objective(Context()) == (3, {})
assert not {"scaling", "cluster", "wire"} & {name.partition(".")[0] for name in sys.modules}
"""


def test_the_controller_needs_no_baton(tmp_path: Path) -> None:
    policy = AutoscalingPolicy(policy_function=f"{ObjectivePolicy.__module__}:{ObjectivePolicy.__name__}")
    policy.serialize_policy()
    names = ",".join(WorkerSample.__slots__)
    subprocess.run(
        [sys.executable, "-P", "-c", _IN_THE_CONTROLLER, names],
        input=policy._serialized_policy_def, cwd=tmp_path, check=True, timeout=60,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    )  # fmt: skip
