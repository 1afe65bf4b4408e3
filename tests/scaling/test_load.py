"""What a worker reports as its load."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scaling.demand import DecodeDemand
from scaling.load import load_share, worker_sample
from scaling.target import workers_for_load
from scheduler.config import SchedulerConfig
from tests.scheduler.rig import Rig
from wire.records import Role, WorkerLoad, WorkerRecord


def _record(role: Role, load: WorkerLoad, total_tokens: int = 1000) -> WorkerRecord:
    return WorkerRecord(
        id="w",
        incarnation=1,
        role=role,
        mailbox="",
        events="",
        replay="",
        model="m",
        fingerprint="f",
        groups=(),
        max_context_tokens=1000,
        total_tokens=total_tokens,
        max_running_requests=10,
        pid=1,
        host="h",
        transfer_backends=(),
        load=load,
    )


@pytest.mark.parametrize(
    ("role", "load", "share"),
    [
        (Role.PREFILL, WorkerLoad(queued_prefill_tokens=0), 0.0),
        (Role.PREFILL, WorkerLoad(queued_prefill_tokens=300), 1.5),
        (Role.DECODE, WorkerLoad(headroom_tokens=1000), 0.0),
        (Role.DECODE, WorkerLoad(headroom_tokens=250, running_requests=1), 0.75),
        (Role.DECODE, WorkerLoad(headroom_tokens=1000, running_requests=10, waiting_requests=5), 1.5),
        (Role.DECODE, WorkerLoad(headroom_tokens=0, running_requests=4, waiting_in_routers=2.0), 1.5),
        (Role.DECODE, WorkerLoad(headroom_tokens=1000, running_requests=10, waiting_in_routers=5.0), 1.5),
        (Role.DECODE, WorkerLoad(headroom_tokens=0, waiting_in_routers=3.0), 4.0),
    ],
)
def test_the_scarcer_resource_is_the_load(role: Role, load: WorkerLoad, share: float) -> None:
    assert load_share(_record(role, load), prefill_tokens_per_worker=200) == pytest.approx(share)


def test_a_sample_tells_running_from_waiting() -> None:
    load = WorkerLoad(
        running_requests=5, waiting_requests=20, headroom_tokens=700, decode_step_s=0.02,
        prompts=3, prefilled_tokens=90, decoded_tokens=40,
    )  # fmt: skip
    sample = worker_sample(_record(Role.DECODE, load))
    assert (sample.rows, sample.waiting, sample.share) == (5, 20, 0.5)
    assert (sample.prompts, sample.prefilled_tokens, sample.decoded_tokens, sample.step_s) == (
        3,
        90,
        40,
        0.02,
    )


@pytest.mark.parametrize("prompt", [64, 256, 1000])
def test_a_fleet_without_headroom_wants_more_workers(prompt: int) -> None:
    """Routers send such workers nothing. Most of their memory is free, but promised to what runs."""
    config = SchedulerConfig(model="m", max_running_requests=10)
    rig = Rig(pool_tokens=4096, max_context=4096, pre_alloc=8, config=config)
    while rig.scheduler.load().headroom_tokens > 0:
        rig.add([(rig.rooms * 7 + at) % 490 + 6 for at in range(prompt)], 700)
        while rig.scheduler.load().queued_prefill_tokens and rig.scheduler.load().headroom_tokens:
            rig.step()
    load = rig.scheduler.load()
    assert load.running_requests < config.max_running_requests, "memory is what is scarce"
    record = _record(Role.DECODE, load, total_tokens=4096)

    share = load_share(record, prefill_tokens_per_worker=1)
    assert share >= 1.0
    assert workers_for_load([share] * 4, target_load=0.7) > 4

    demand = DecodeDemand(itl_p95_s=0.05)
    for second in range(0, 100, 10):
        decoded = load.running_requests * 50 * second
        sample = replace(worker_sample(record), decoded_tokens=decoded, step_s=0.02)
        demand.observe(dict.fromkeys("abcd", sample), float(second))
    assert demand.workers(60.0) > 4


def test_rooms_that_wait_in_routers_want_workers_at_once() -> None:
    """Routers give a full worker no more: what it has itself says nothing of how many there are too few."""
    load = WorkerLoad(running_requests=10, decode_step_s=0.02, waiting_in_routers=10.0)
    record = _record(Role.DECODE, load)
    assert workers_for_load([load_share(record, prefill_tokens_per_worker=1)] * 4, target_load=1.0) == 8

    demand = DecodeDemand(itl_p95_s=0.05)
    for second in range(0, 100, 10):
        sample = replace(worker_sample(record), decoded_tokens=500 * second)
        demand.observe(dict.fromkeys("abcd", sample), float(second))
    assert 8 <= demand.workers(60.0) < 9


def test_an_idle_worker_has_no_load() -> None:
    rig = Rig(pool_tokens=4096)
    rig.add(range(6, 406), 20)
    rig.run()
    record = _record(Role.DECODE, rig.scheduler.load(), total_tokens=4096)
    assert load_share(record, prefill_tokens_per_worker=1) == 0.0
