"""What a worker reports as its load."""

from __future__ import annotations

import pytest

from scaling.load import load_share, worker_sample
from wire.records import Role, WorkerLoad, WorkerRecord


def _record(role: Role, load: WorkerLoad) -> WorkerRecord:
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
        total_tokens=1000,
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
        (Role.DECODE, WorkerLoad(free_tokens=1000), 0.0),
        (Role.DECODE, WorkerLoad(free_tokens=250, running_requests=1), 0.75),
        (Role.DECODE, WorkerLoad(free_tokens=1000, running_requests=10, waiting_requests=5), 1.5),
    ],
)
def test_the_scarcer_resource_is_the_load(role: Role, load: WorkerLoad, share: float) -> None:
    assert load_share(_record(role, load), prefill_tokens_per_worker=200) == pytest.approx(share)


def test_a_sample_tells_running_from_waiting() -> None:
    load = WorkerLoad(
        running_requests=5, waiting_requests=20, free_tokens=700, decode_step_s=0.02,
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
