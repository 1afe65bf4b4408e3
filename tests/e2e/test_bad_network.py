"""Messages between router, prefill and decode that are lost, doubled, late or out of order change nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine.fake import fake_generate
from tests.chaos.network import Network
from tests.harness.local_stack import stack


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.invariants)])
def test_lost_doubled_late_and_reordered_messages_change_nothing(
    tiny_model: Path, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(256) for _ in range(rng.randrange(1, 150))] for _ in range(24)]
    with (
        Network(seed) as network,
        stack(
            tiny_model,
            tmp_path,
            prefill=2,
            decode=2,
            router={"prefill_on_decode_tokens": 0, "max_queued": 0},
            runner=("tests.chaos.launcher", network.address),
            engine="fake",
            max_total_tokens=2048,
            chunked_prefill_size=48,
        ) as running,
    ):
        network.faults.lose_all()
        answers = running.generate_all(prompts, 40)
        network.faults.heal()
        disturbed = network.faults.disturbed
        assert all(disturbed[sender] > 0 for sender in ("router", "P", "D")), disturbed
        assert [answer["output_ids"] for answer in answers] == [
            fake_generate(prompt, 40) for prompt in prompts
        ]
        running.settle()
        finished = [running.inspect(worker, "metrics")["finished"] for worker in running.decode]
        assert sum(finished) >= len(prompts), "a room that started again may have ended twice"
