"""The dry run of the CUDA path passes for the families, and finds the faults that it is for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.backends.flashinfer
import engine.runner
from engine.backends.flashinfer import FlashInferAttention
from engine.device_copies import FetchedTensor, upload
from engine.last_tokens import LastTokens
from engine.sampler import Sampler
from kvtransfer.copies import CudaCopies
from tools.gpu_dry_run import STORED, dry_run, group_of, make_model

FAMILIES = ("gpt_oss-mxfp4", "deepseek_v32", "qwen3_next", "qwen3-wide")
MORE = ("deepseek_v3", "qwen3_moe-wide-fp8", "gemma2-wide")
"""One of each kind of layer, and each format in which weights stay stored. `make gpu` runs all families."""
REST = pytest.mark.invariants


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    directory = tmp_path_factory.mktemp("tiny")
    return lambda name: make_model(name, directory)


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(one, marks=REST) for one in MORE)])
def test_no_step_of_a_family_would_wait_or_break_on_a_gpu(family: str, tiny: Callable[[str], Path]) -> None:
    seen = dry_run(tiny(family))
    assert seen["replays"] >= 4
    assert seen["captured operators"] > 500
    assert seen["copies"] > 100
    assert seen["staged batches"] >= 2
    assert seen["stored formats"] == (family in STORED)


@pytest.mark.parametrize(
    "rank",
    [
        "qwen3_next-rank1",
        *(pytest.param(one, marks=REST) for one in ("qwen3-wide-rank0", "deepseek_v3-rank1")),
    ],
)
def test_no_step_of_a_rank_would_wait_or_break_on_a_gpu(rank: str, tiny: Callable[[str], Path]) -> None:
    seen = dry_run(tiny(rank), group_of(rank))
    assert seen["replays"] >= 4
    assert seen["captured operators"] > 500
    assert seen["staged batches"] >= 2


def pageable(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(array: Any, device: torch.device) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    monkeypatch.setattr(engine.runner, "upload", copy)


def blocking(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(self: FetchedTensor, values: torch.Tensor, is_reused: bool = False) -> None:
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._host.copy_(values)

    monkeypatch.setattr(FetchedTensor, "__init__", fetch)


def offsets_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.backends.flashinfer, "pinned", upload)


def new_slots_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = FlashInferAttention.prepare

    def prepared(self: FlashInferAttention, batch: Any) -> None:
        prepare(self, batch)
        self._slots.pages = self._slots.pages.clone()

    monkeypatch.setattr(FlashInferAttention, "prepare", prepared)


def a_look_at_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sampler.sample

    def sampled(self: Sampler, logits: torch.Tensor, *more: Any) -> Any:
        assert logits.argmax(-1).tolist()
        return sample(self, logits, *more)

    monkeypatch.setattr(Sampler, "sample", sampled)


def only_unknown_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(self: LastTokens, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return ids + self._tokens[rows[ids < 0]].sum()

    monkeypatch.setattr(LastTokens, "fill", fill)


def a_tensor_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(self: LastTokens, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return ids + torch.zeros(len(ids), dtype=torch.int64)

    monkeypatch.setattr(LastTokens, "fill", fill)


def pageable_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaCopies, "pinned", lambda _, *shape: torch.empty(shape, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("seed", "found"),
    [
        (pageable, "pageable: a copy to the device"),
        (pageable_stages, "pageable: a copy"),
        (blocking, "wait: a copy to the host"),
        (offsets_on_the_device, "waits for the device to read qo_indptr"),
        (new_slots_each_step, "address: what was captured"),
        (a_look_at_the_tokens, "wait: the host asks for a value"),
        (only_unknown_tokens, "shape: a mask as an index"),
        (a_tensor_on_the_host, "device: |host: "),
    ],
)
def test_a_seeded_fault_is_found(
    seed: Callable[[pytest.MonkeyPatch], None], found: str, tiny: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    seed(monkeypatch)
    with pytest.raises(AssertionError, match=found):
        dry_run(tiny("qwen3"))
