"""`auto` never computes on the CPU of a machine whose GPU cannot be used, and says why it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import worker.device
from common.errors import ConfigError
from common.options import parse_options
from worker.build import overlap_depth
from worker.device import choose_device
from worker.options import WorkerOptions


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Torch as it is built for CUDA, in a machine with two GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(worker.device, "gpus_found", lambda: ["/dev/nvidia0", "/dev/nvidia1"])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "ones", lambda _count, device: torch.zeros(1))
    return monkeypatch


def test_a_machine_without_a_gpu_computes_on_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.device, "gpus_found", list)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    assert choose_device("cpu") == torch.device("cpu")


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(("wanted", "index"), [("auto", 0), ("cuda", 0), ("cuda:1", 1)])
def test_a_cuda_device_has_an_index(wanted: str, index: int) -> None:
    assert choose_device(wanted) == torch.device("cuda", index)


def refused(wanted: str) -> str:
    with pytest.raises(ConfigError) as caught:
        choose_device(wanted)
    assert caught.value.key == "device"
    return str(caught.value)


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_torch_without_cuda_is_refused_where_there_is_a_gpu(wanted: str, cuda: pytest.MonkeyPatch) -> None:
    cuda.setattr(torch.version, "cuda", None)
    cuda.setattr(torch.cuda, "is_available", lambda: False)
    said = refused(wanted)
    assert "built without CUDA" in said
    assert "set device to cpu" in said
    assert ("/dev/nvidia0" in said) == (wanted == "auto")


def test_a_gpu_that_ray_hides_is_refused(cuda: pytest.MonkeyPatch) -> None:
    cuda.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "num_gpus" in refused("auto")


def test_a_driver_that_fails_is_quoted(cuda: pytest.MonkeyPatch) -> None:
    def fail(_count: int, device: torch.device) -> torch.Tensor:
        raise RuntimeError("CUDA error: no kernel image is available\nand more")

    cuda.setattr(torch, "ones", fail)
    said = refused("auto")
    assert "no kernel image is available" in said
    assert "and more" not in said


@pytest.mark.usefixtures("cuda")
def test_a_gpu_that_does_not_exist_is_refused() -> None:
    assert "cuda:2 does not exist: torch sees 2" in refused("cuda:2")


@pytest.mark.parametrize("device", ["cuda:", "gpu", "cuda:-1", "mps"])
def test_other_devices_are_refused_by_name(device: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options(WorkerOptions, {"model": "any", "device": device})
    assert caught.value.key == "device"


def test_the_options_of_a_gpu_are_taken() -> None:
    options = parse_options(WorkerOptions, {"model": "any", "device": "cuda:3", "dtype": "float16"})
    assert (options.device, options.dtype) == ("cuda:3", "float16")


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("given", "depth"),
    [
        ({}, 1),
        ({"device": "cpu"}, 0),
        ({"engine": "fake"}, 0),
        ({"overlap_depth": 0}, 0),
        ({"device": "cpu", "overlap_depth": 1}, 1),
    ],
)
def test_a_gpu_computes_while_the_host_prepares_the_next_step(given: dict[str, Any], depth: int) -> None:
    assert overlap_depth(parse_options(WorkerOptions, {"model": "any", **given})) == depth
