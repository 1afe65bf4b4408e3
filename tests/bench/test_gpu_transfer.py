"""bench.gpu_transfer over stand-ins: what it would measure on a GPU is what it says."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from bench import gpu_transfer
from kvtransfer.region import GroupRegion
from tests.kvtransfer.peers import pool
from tests.kvtransfer.stand_in_copies import StandInCopies
from tests.support.cuda_stand_in import StandInDriver, stand_in_memory

PAGES, SIZE = 12, 4096


def test_every_backend_moves_the_pages() -> None:
    driver, memory = StandInDriver(), stand_in_memory()
    source = pool(PAGES, SIZE, 1, memory=stand_in_memory(driver))
    with memory.allocate(PAGES * SIZE) as buffer:
        tensor = buffer.tensor.view(PAGES, SIZE)
        target = GroupRegion(tensor, buffer.fd, StandInCopies(late=False), memory)
        took = gpu_transfer.run(source, target, 8, rounds=2)
    assert set(took) == {"cuda_ipc", "tcp", "copy"}
    assert all(value > 0 for value in took.values())
    assert driver.calls.count("cuMemcpyAsync") >= 4


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is for GPUs")
def test_without_a_gpu_it_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.gpu_transfer", "--json"])
    gpu_transfer.main()
    said = capsys.readouterr()
    assert "not measured: torch" in said.err
    result = json.loads(said.out)
    assert (result["ratios"], result["values"]) == ({}, {})
