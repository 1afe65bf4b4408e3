"""A worker on a GPU: its capacity is measured, it stays within its share, and serves what it should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.scheduler import DecodeHere
from common.options import parse_options
from engine.runner import ModelRunner
from scheduler.config import Phase
from scheduler.req import Req, RequestLimits
from tests.engine.conftest import PROMPTS, Drawn
from wire.request import GenerateRequest, OutputDelta, SamplingParams
from worker.build import build_engine, build_scheduler
from worker.options import WorkerOptions

OUTPUTS = 20
SLACK = 256 << 20  # other processes come and go


class Tokens(DecodeHere):
    """Keeps the tokens of each room."""

    def __init__(self) -> None:
        self.of: dict[int, list[int]] = {}

    def on_tokens(self, req: Req, start: int, delta: OutputDelta) -> None:
        """Keep them."""
        self.of[req.room] = [*self.of.get(req.room, [])[:start], *delta.tokens]


def serve(path: Path, outputs: int = OUTPUTS, **given: Any) -> list[list[int]]:
    """What a worker with a measured capacity answers to PROMPTS."""
    options = parse_options(
        WorkerOptions,
        {
            "model": str(path),
            "dtype": "float32",
            "overlap_depth": 1,
            "max_running_requests": 4,
            "gpu_memory_utilization": 0.25,
            **given,
        },
    )
    free, total = torch.cuda.mem_get_info(options.device)
    runner, memory = build_engine(options, reserves=False)
    assert isinstance(runner, ModelRunner)
    assert free - torch.cuda.mem_get_info(options.device)[0] <= 0.25 * total + SLACK
    tokens = Tokens()
    scheduler = build_scheduler(options, memory, runner, tokens, frozenset(Phase))
    limits = RequestLimits(256, runner.spec.vocab_size, ())
    for room, prompt in enumerate(PROMPTS, 1):
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=outputs)
        ids = np.asarray(prompt, dtype="<i4").tobytes()
        request = GenerateRequest(request_id=str(room), room=room, epoch=1, prompt=ids, sampling=sampling)
        scheduler.add(Req.from_request(request, "m", limits))
    for _ in range(1000):
        if scheduler.idle:
            break
        scheduler.step()
    runner.close()
    memory.close()
    return [tokens.of[room] for room in (1, 2, 3)]


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_requests_are_served_from_a_measured_capacity(family: str, drawn: Drawn, device: str) -> None:
    path, expected = drawn(family)
    assert serve(path, device=device) == [answer[:OUTPUTS] for answer in expected]
