"""Decode workers that leave hand their rooms over with their KV, in real processes."""

from __future__ import annotations

import itertools
import json
import re
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.fake import fake_generate
from tests.e2e.test_failures import leave, prompts, take, wait_until_busy
from tests.harness.local_stack import Stack, stack
from tests.harness.processes import Child
from tests.support.reference import draw_model

GROUPS = ("window", "state")
TOKENS = 200
OPTIONS: dict[str, Any] = {
    "engine": "fake",
    "fake_step_s": 0.01,
    "max_total_tokens": 8192,
    "max_running_requests": 16,
    "chunked_prefill_size": 48,
    "overlap_depth": 1,
}
ROUTER: dict[str, Any] = {"prefill_on_decode_tokens": 0, "max_queued": 0}


@dataclass
class Stream:
    """One streamed answer: its tokens and when they came."""

    tokens: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    ended: bool = False

    def longest_gap(self) -> float:
        """Seconds between two events."""
        return max((after - before for before, after in itertools.pairwise(self.at)), default=0.0)


def read_stream(running: Stack, prompt: list[int], tokens: int, stream: Stream) -> Stream:
    """POST /generate, streamed, to the end."""
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": tokens}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    with running.http.stream("POST", "/generate", json=body) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                stream.ended = True
            elif line.startswith("data: "):
                new = json.loads(line[6:])["output_ids"]
                if len(new) > len(stream.tokens):
                    stream.at.append(time.monotonic())
                    stream.tokens = new
    return stream


def computed(running: Stack, worker: Child) -> int:
    """Prompt tokens that a worker has computed."""
    return int(running.inspect(worker, "metrics")["prefill_tokens"])


def until_each_has(streams: list[Stream], tokens: int) -> None:
    deadline = time.monotonic() + 60.0
    while any(len(stream.tokens) < tokens for stream in streams):
        assert time.monotonic() < deadline, "a stream does not go on"
        threading.Event().wait(0.01)


@pytest.mark.parametrize(
    "backend", ["shm", *(pytest.param(other, marks=pytest.mark.invariants) for other in ("tcp", "mooncake"))]
)
def test_streams_of_a_worker_that_leaves_go_on_and_compute_nothing(
    tiny_model: Path, tmp_path: Path, backend: str
) -> None:
    if backend == "mooncake":
        pytest.importorskip("mooncake.engine", reason="Mooncake is not installed")
    asked = prompts(16, seed=3)
    options = {
        **OPTIONS, "kv_transfer_backend": backend, "fake_groups": GROUPS, "page_size": 8,
        "max_mamba_cache_size": 64, "mamba_track_interval": 16,
    }  # fmt: skip
    streams = [Stream() for _ in asked]
    with stack(tiny_model, tmp_path, prefill=1, decode=2, router=ROUTER, **options) as running:
        with ThreadPoolExecutor(len(asked)) as pool:
            futures: list[Future[Stream]] = [
                pool.submit(read_stream, running, prompt, 400, stream)
                for prompt, stream in zip(asked, streams, strict=True)
            ]
            until_each_has(streams, 4)
            gone = take(running.decode, running.decode[0])
            leave(gone)
            assert gone.process.wait(60) == 0
            gone.end()
            for future in futures:
                future.result(100.0)
        assert [stream.tokens for stream in streams] == [
            fake_generate(prompt, 400, groups=GROUPS) for prompt in asked
        ]
        assert all(stream.ended for stream in streams)
        assert computed(running, running.decode[0]) == 0
        metrics = running.admin.get("/metrics").text
        assert re.search(r'^baton_router_moves_total\{state="done"\} [1-9]', metrics, re.MULTILINE)
        assert "baton_router_restarts_total 0.0" in metrics
        gaps = [1000 * stream.longest_gap() for stream in streams]
        p50, p99 = np.percentile(gaps, [50, 99])
        sys.stdout.write(f"{backend}: move_gap_ms p50 {p50:.0f} p99 {p99:.0f}\n")
        running.settle()


@pytest.mark.parametrize(
    "family",
    ["qwen3_next", "deepseek_v3"]
    + [pytest.param(other, marks=pytest.mark.oracle_full) for other in ("qwen3", "gemma3_text")],
)
def test_a_stream_that_moves_twice_equals_transformers(tmp_path: Path, family: str) -> None:
    """Full attention, windows, states, latents: two of three workers leave, the stream being there."""
    prompt = prompts(1, seed=4)[0]
    model, (right,) = draw_model(family, tmp_path / "model", 1, [prompt], TOKENS)
    stream = Stream()
    options = {"max_total_tokens": 2048, "page_size": 8, "overlap_depth": 1}
    with stack(model, tmp_path, prefill=1, decode=3, router=ROUTER, **options) as running:
        running.generate(prompt, 3)
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(read_stream, running, prompt, TOKENS, stream)
            left = []
            for moves in (1, 2):
                left.append(take(running.decode, wait_until_busy(running, 1)))
                leave(left[-1])
                until_moved(running, moves)
            future.result(100.0)
        for gone in left:
            gone.end()
        assert stream.tokens == right
        running.settle()


def until_moved(running: Stack, moves: int) -> None:
    deadline = time.monotonic() + 60.0
    while f'baton_router_moves_total{{state="done"}} {moves}.0' not in running.admin.get("/metrics").text:
        assert time.monotonic() < deadline, "the stream was not moved"
