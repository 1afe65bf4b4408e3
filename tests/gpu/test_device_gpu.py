"""What a CUDA device does later: results, pages, samples and copies come when it is done, and are right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import ForwardBatch, SamplingRows
from engine.device_copies import upload
from engine.sampler import Sampler
from engine.sampling_state import SamplingState
from kvcache.layout import KVGroupSpec
from kvcache.tiers.host_pool import HostPool
from kvtransfer.region import region_of
from tests.support.driver import Driver, open_runner
from tests.support.tiny_models import make_tiny
from wire.request import SamplingParams

SLEEP_CYCLES = 1 << 30  # about half a second


def test_a_result_comes_after_the_device_has_done_the_forward(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that samples nothing waits, too: its pages may be sent next."""
    runner, pool = open_runner(make_tiny("qwen3", tmp_path, 0), 16, 8, attention="auto", device=device)
    driver, done = Driver(runner, 8, 16), torch.cuda.Event()
    issue: Callable[[ForwardBatch], Any] = runner.issue
    before = pool.bytes.clone()

    def slow(batch: ForwardBatch) -> Any:
        torch.cuda._sleep(SLEEP_CYCLES)
        read = issue(batch)
        done.record()
        return read

    lane = driver.add(list(range(60)))
    for _ in range(2):  # without and with context: loads kernels, which may wait
        issue(driver.batch([(lane, 16)]))()
        torch.cuda.synchronize()
    monkeypatch.setattr(runner, "issue", slow)
    launched = runner.launch(driver.batch([(lane, 16)]))
    assert not done.query(), "the launch waited"
    assert not len(launched.result(60).tokens)
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):  # knows nothing of the stream of the forward
        pages = pool.bytes[lane.pages[2]].cpu()
    assert not pages.equal(before[lane.pages[2]].cpu())
    torch.cuda.synchronize()
    assert pages.equal(pool.bytes[lane.pages[2]].cpu())
    runner.close()


def test_samples_are_those_of_the_cpu(device: str) -> None:
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, seed=2),
        SamplingParams(temperature=0.5, repetition_penalty=1.2, presence_penalty=0.3, seed=3, top_logprobs=3),
    ]
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 3, (len(params), 4000)).astype(np.float32))
    sampled = []
    for where in ("cpu", device):
        target = torch.device(where)
        states = tuple(SamplingState(one, np.arange(9, dtype=np.int32), ()) for one in params)
        sampler, tokens = Sampler(4000, target), []
        for step in range(16):
            rows = SamplingRows(states, np.full(len(params), step))
            result = sampler.sample(logits.roll(step, 1).to(target), rows, upload(rows.positions, target))
            tokens.append(result.wait().tokens.tolist())
            for state, token in zip(states, tokens[-1], strict=True):
                state.outputs.append(token)
        sampled.append(tokens)
    assert sampled[0] == sampled[1]


def test_pages_go_to_the_host_and_back(device: str) -> None:
    """In several batches of the stage, in any order of pages."""
    source = torch.randint(0, 256, (50, 1 << 20), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    regions = [region_of(tensor) for tensor in (source, target)]
    pages = np.random.default_rng(0).permutation(50)[:37]
    batches = [
        np.asarray(batch.view()).reshape(-1, 1 << 20)[batch.pages] for batch in regions[0].to_host(pages)
    ]  # indexed by an array: copies
    read = np.concatenate(batches)
    done = 0
    for batch in regions[1].from_host(pages):
        rows = np.asarray(batch.view()).reshape(-1, 1 << 20)
        rows[batch.pages] = read[done : done + len(batch.pages)]
        done += len(batch.pages)
    assert done == len(pages)
    assert target[pages.tolist()].equal(source[pages.tolist()])


def test_the_host_tier_is_pinned_until_it_is_closed(device: str) -> None:
    spec = KVGroupSpec((0, 1), 2, 64, torch.bfloat16)
    pool = HostPool([spec], 16, {"full": 1000}, torch.device(device))
    pages = pool.arenas["full"].bytes
    assert pages.is_pinned()
    pages[7].copy_(torch.full_like(pages[7], 5, device=device), non_blocking=True)
    torch.cuda.synchronize()
    assert (pages[7] == 5).all()
    pool.close()
    assert not pages.is_pinned()
