"""PrefillDemand and DecodeDemand: how the need follows arrivals, queues, steps, memory and objectives."""

from __future__ import annotations

import pytest

from scaling.demand import DecodeDemand, PrefillDemand
from scaling.sample import Totals, WorkerSample

SPEED = 20_000.0


def prefill(tokens_per_s: float, queued: float = 0.0, ttft_s: float = 2.0, prompt: float = 4000.0) -> float:
    """The need of two workers that compute this in all, for 100 s, and then have this queue."""
    demand = PrefillDemand(ttft_s)
    for second in range(0, 101, 5):
        tokens = tokens_per_s * second / 2
        one = WorkerSample(
            prompts=tokens / prompt,
            prefilled_tokens=tokens,
            queued_tokens=queued / 2 if second == 100 else 0.0,
            prefill_tokens_per_s=SPEED,
        )
        demand.observe({"a": one, "b": one}, float(second))
    return demand.workers(0.0)


def test_prefill_needs_more_than_the_work_that_arrives() -> None:
    assert 2.0 < prefill(2 * SPEED) < 3.0
    assert 10.0 < prefill(10 * SPEED) < 11.5, "a large fleet shares its reserve"


def test_nothing_arrives_and_nothing_is_needed() -> None:
    assert prefill(0.0) == 0.0
    assert PrefillDemand(2.0).workers(60.0) == 0.0


def test_a_tighter_objective_needs_more() -> None:
    assert prefill(2 * SPEED, ttft_s=0.7) > prefill(2 * SPEED, ttft_s=2.0) + 0.1


def test_an_objective_that_prompts_alone_miss_asks_for_no_crowd() -> None:
    assert prefill(2 * SPEED, prompt=50_000.0) < 6.0


def test_a_queue_that_is_overdue_needs_more() -> None:
    assert prefill(2 * SPEED, queued=60 * SPEED) > prefill(2 * SPEED) + 1.5


def decode(
    tokens_per_s: float, rows: float, share: float, waiting: float = 0.0, itl_s: float = 0.05
) -> float:
    """The need of two workers with 10 ms steps and 0.1 ms more a row, after a quiet minute."""
    demand = DecodeDemand(itl_s)
    made = 0.0
    for second in range(0, 161, 5):
        quiet = second < 60
        now_rows = 1.0 if quiet else rows / 2
        one = WorkerSample(
            decoded_tokens=made / 2,
            rows=now_rows,
            waiting=0.0 if quiet else waiting / 2,
            share=share * now_rows / (rows / 2),
            step_s=0.010 + 0.0001 * now_rows,
        )
        demand.observe({"a": one, "b": one}, float(second))
        made += 5 * (200.0 if quiet else tokens_per_s)
    return demand.workers(0.0)


def test_decode_is_bound_by_memory_or_rows() -> None:
    # 100 rows of 10.1 + 0.1 x 50 ms, half of two workers' memory; in all 1 worker is busy
    few = decode(6600.0, rows=100.0, share=0.5)
    assert 1.0 < few < 2.2
    assert decode(6600.0, rows=100.0, share=0.9) > 1.4 * few


def test_decode_is_bound_by_the_step() -> None:
    loose = decode(6600.0, rows=100.0, share=0.1, itl_s=0.05)
    assert decode(6600.0, rows=100.0, share=0.1, itl_s=0.014) > 1.5 * loose


def test_requests_that_wait_count() -> None:
    assert decode(6600.0, 100.0, 0.9, waiting=100.0) > 1.3 * decode(6600.0, 100.0, 0.9)


def test_totals_grow_from_a_workers_second_sample() -> None:
    totals = Totals()
    assert totals.growth({"a": 100.0}) == 0.0
    assert totals.growth({"a": 130.0, "b": 50.0}) == 30.0
    assert totals.growth({"b": 60.0}) == 10.0, "a has left"
    assert totals.growth({"b": 5.0}) == 0.0, "b began again"
    assert totals.growth({"b": 9.0}) == 4.0
    assert totals.growth({"a": 900.0, "b": 5.0}) == 0.0


@pytest.mark.parametrize("demand", [PrefillDemand(2.0), DecodeDemand(0.05)])
def test_a_fleet_without_workers_is_no_error(demand: PrefillDemand | DecodeDemand) -> None:
    demand.observe({}, 0.0)
    demand.observe({}, 5.0)
    assert demand.workers(60.0) == 0.0
