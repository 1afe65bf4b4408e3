"""Decode steps over fixed buffers, padded: tokens equal generate, and nothing but the buffers is read."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from engine import graphs
from engine.backends.decode_attention import DecodeAttention
from engine.batch import StateSlots, WindowPages
from engine.cuda import triton_kernels
from engine.graphs import CudaRecorder, DecodeLimits, Outputs, StepInputs
from engine.padding import is_decode, padded, padded_sizes, padding
from tests.engine.conftest import PROMPTS, Drawn
from tests.support.driver import Driver, open_pools
from tests.support.eager_recorder import EagerRecorder
from tests.support.flashinfer_stand_in import flashinfer_module, open_flashinfer
from tests.support.reference import reference_generate

LIMITS = DecodeLimits(sequences=3, context_pages=10, rows=8)
FAMILIES = [
    *("qwen3", "mistral_window", "gpt_oss", "gemma2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"),
    *("qwen3_moe", "qwen3_next", "lfm2", "llama4_text", "mimo_v2_flash", "kimi_linear", "deepseek_v4"),
    *("axk2", "bailing_hybrid", "hy_v4", "minimax_m3_vl_text", "mistral_large4_text", "glm5_next_text"),
]


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    package, mla = flashinfer_module()
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", mla)


def open_recorded(path: Path, **options: Any) -> tuple[Driver, EagerRecorder]:
    runner, pools = open_flashinfer(path, 16, 40, **options)
    recorder = EagerRecorder()
    runner.record_decode(LIMITS, recorder)
    window = None if options else pools.get("window")
    return Driver(runner, 40, 16, window_pool=window), recorder


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_replays_and_mixed_batches_between_them_give_generates_tokens(
    family: str, drawn: Drawn
) -> None:
    check_replays(family, drawn)


@pytest.mark.parametrize(
    "family", ["qwen3", "mistral_window", "gpt_oss", "gemma2", "llama4_text", "mimo_v2_flash"]
)
def test_so_they_do_with_our_own_attention(
    family: str, drawn: Drawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its definition, with windows, sinks and softcaps."""
    monkeypatch.setattr(triton_kernels, "available", lambda: True)
    monkeypatch.setattr("engine.backends.decode_attention.DTYPES", (torch.float32,))
    monkeypatch.setattr("engine.backends.decode_attention.HEAD_DIMS", (16, 32))
    prepared = []
    prepare = DecodeAttention.prepare
    monkeypatch.setattr(
        DecodeAttention, "prepare", lambda self, batch: prepared.append(self) or prepare(self, batch)
    )
    check_replays(family, drawn)
    assert prepared


def check_replays(family: str, drawn: Drawn) -> None:
    path, expected = drawn(family)
    driver, recorder = open_recorded(path)
    lanes = [driver.add(prompt) for prompt in PROMPTS]
    driver.generate(lanes, 24, chunk=30, stagger=4)
    driver.engine.close()
    assert [lane.outputs for lane in lanes] == [answer[:24] for answer in expected]
    assert [len(step.outputs.logits) for step in recorder.steps] == [4, 2, 1]
    assert all(step.replays for step in recorder.steps)


def test_steps_that_are_launched_ahead_take_their_tokens_from_the_device(drawn: Drawn) -> None:
    path, expected = drawn("qwen3")
    driver, recorder = open_recorded(path, overlap=True)
    lanes = [driver.add(prompt) for prompt in PROMPTS]
    launch = driver.engine.launch
    pending = [launch(driver.batch([(lane, lane.prompt_len) for lane in lanes]))]
    pending += [launch(driver.batch([(lane, 1) for lane in lanes], unknown=True)) for _ in range(20)]
    tokens = np.stack([launched.result(60).tokens for launched in pending], axis=1)
    driver.engine.close()
    assert tokens.tolist() == [answer[:21] for answer in expected]
    assert recorder.steps[0].replays == 20


def test_replays_are_issued_where_they_are_launched_and_whole_forwards_on_a_thread(
    drawn: Drawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = drawn("qwen3")
    driver, _ = open_recorded(path, overlap=True)
    issue, threads = driver.engine.issue, list[threading.Thread]()
    monkeypatch.setattr(
        driver.engine, "issue", lambda batch: threads.append(threading.current_thread()) or issue(batch)
    )
    lane = driver.add(PROMPTS[0])
    driver.generate([lane], 6, chunk=len(PROMPTS[0]))
    driver.engine.close()
    assert lane.outputs == expected[0][:6]
    here = threading.current_thread()
    assert [thread is here for thread in threads] == [False, *[True] * 5]


def test_a_hybrids_prompt_of_one_token_starts_without_a_state(drawn: Drawn) -> None:
    """It looks like a decode row, but a graph would read some state."""
    path, _ = drawn("qwen3_next")
    driver, recorder = open_recorded(path)
    lane = driver.add([77])
    driver.generate([lane], 6, chunk=8)
    driver.engine.close()
    assert lane.outputs == reference_generate(path, [77], 6)[0]
    assert sum(step.replays for step in recorder.steps) == 5


def test_a_model_whose_backend_reads_the_batch_on_the_host_is_not_recorded(drawn: Drawn) -> None:
    path, _ = drawn("qwen3")
    runner, _ = open_pools(path, 16, 40)
    recorder = EagerRecorder()
    runner.record_decode(LIMITS, recorder)
    runner.close()
    assert not recorder.steps


def test_sizes_are_powers_of_two_that_hold_the_largest_batch() -> None:
    assert padded_sizes(1) == (1,)
    assert padded_sizes(48) == (1, 2, 4, 8, 16, 32, 64)


@pytest.mark.parametrize("size", padded_sizes(8))
def test_output_positions_lie_where_the_kernel_that_draws_was_loaded_for(size: int) -> None:
    """Triton has other machine code for addresses that are not multiples of 16, and compiles it at first
    use."""
    assert StepInputs(size, torch.device("cpu")).output_positions.data_ptr() % 16 == 0


def test_all_recorders_of_a_gpu_record_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is made later: cuBLAS keeps a workspace for each stream that it is used on."""
    streams: set[Any] = set()
    device = [0]

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        streams.add(stream)
        yield

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device[0])
    monkeypatch.setattr(torch.cuda, "current_stream", MagicMock())
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: MagicMock())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", MagicMock)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "graph", lambda _graph, _pool, stream, **_: on(stream))
    monkeypatch.setattr(graphs, "_side_stream", cache(graphs._side_stream.__wrapped__))
    outputs = Outputs(*(torch.zeros(1) for _ in Outputs._fields))
    for recorder in (CudaRecorder(), CudaRecorder()):
        for _ in range(3):
            assert recorder.record(lambda: outputs).outputs is outputs
    assert len(streams) == 1
    device[0] = 1
    CudaRecorder().record(lambda: outputs)
    assert len(streams) == 2


def test_padding_lies_in_scratch_alone(drawn: Drawn) -> None:
    path, _ = drawn("gpt_oss")
    runner, _ = open_pools(path, 16, 40)
    driver = Driver(runner, 40, 16)
    lane = driver.add([1, 2, 3])
    lane.done = 2
    batch = driver.batch([(lane, 1)])
    runner.close()
    assert is_decode(batch)
    whole = padded(batch, 4)
    assert whole.seq_lens.tolist() == [3, 1, 1, 1]
    for array in (whole.rows, whole.out_slots, whole.page_table, whole.positions):
        assert not array[1:].any()
    assert isinstance(whole.window, WindowPages)
    assert not whole.window.out_slots[1:].any()
    assert whole.sampled.tolist() == [0]
    nothing = padding(2, windows=True, states=True)
    assert isinstance(nothing.state, StateSlots)
    assert nothing.state.writes.tolist() == [0, 0]
    assert not is_decode(nothing)
