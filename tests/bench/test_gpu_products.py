"""bench.gpu_products on a CPU: what it would measure on a GPU is what it says."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from bench import gpu_products


def test_each_format_is_measured_beside_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_products, "ROWS", (1, 3))
    ratios, values = gpu_products.run(torch.device("cpu"), 32, 64, 2, rounds=1)
    assert ratios.keys() == {"fp8_1", "fp8_3", "mxfp4_1", "mxfp4_3", "nvfp4_1", "nvfp4_3", "int4_1", "int4_3"}
    assert values.keys() == {f"{name}_us" for name in [*ratios, "bfloat16_1", "bfloat16_3"]}
    assert all(value > 0 for value in [*ratios.values(), *values.values()])


def test_products_are_of_finite_numbers() -> None:
    x = torch.randn(2, 64).bfloat16()
    for form in ("bfloat16", *gpu_products.FORMATS):
        for product in gpu_products.products_of(form, torch.device("cpu"), 32, 64, 2):
            assert product(x).isfinite().all()


def test_the_gpu_that_was_named_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams, graphs and Triton's kernels are on the current device."""
    current = ["cuda:0"]

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        before, current[0] = current[0], str(device)
        yield
        current[0] = before

    def run(device: torch.device, *_: int) -> tuple[dict[str, float], dict[str, float]]:
        assert current == [str(device)] == ["cuda:1"]
        return {"fp8_1": 2.0}, {}

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(gpu_products, "choose_device", torch.device)
    monkeypatch.setattr(gpu_products, "run", run)
    monkeypatch.setattr(sys, "argv", ["bench.gpu_products", "--device", "cuda:1"])
    gpu_products.main()
    assert current == ["cuda:0"]


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(sys, "argv", ["bench.gpu_products", "--json"])
    gpu_products.main()
    printed = capsys.readouterr()
    assert "not measured" in printed.err
    assert json.loads(printed.out)["ratios"] == {}
