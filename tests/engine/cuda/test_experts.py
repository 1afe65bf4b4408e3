"""Steps of a mixture of experts are recorded only where torch's grouped product does not look at the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.cuda.experts import experts_wait
from engine.graphs import DecodeLimits
from tests.support.driver import open_pools
from tests.support.eager_recorder import EagerRecorder
from tests.support.tiny_configs import FAMILIES, MIXED
from tests.support.tiny_models import make_tiny

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("family", "capability", "dtype", "waits"),
    [
        ("qwen3_moe", (9, 0), torch.bfloat16, False),
        ("mixtral", (10, 0), torch.bfloat16, False),
        ("gpt_oss", (8, 0), torch.bfloat16, True),
        ("deepseek_v3", (12, 0), torch.bfloat16, True),
        ("qwen2_moe", (9, 0), torch.float16, True),
        ("qwen3_next", (8, 9), torch.bfloat16, True),
        ("qwen3", (8, 0), torch.float16, False),
    ],
)
def test_who_waits(
    family: str, capability: tuple[int, int], dtype: torch.dtype, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    config = {**FAMILIES, **MIXED}[family]()
    assert experts_wait(config, dtype, CUDA) == waits
    assert not experts_wait(config, dtype, torch.device("cpu"))


def test_a_model_that_waits_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine.runner.experts_wait", lambda *_: True)
    runner, _ = open_pools(make_tiny("qwen3_moe", tmp_path, 0), 16, 8)
    monkeypatch.setattr(type(runner.attention), "recordable", True)
    recorder = EagerRecorder()
    runner.record_decode(DecodeLimits(sequences=2, context_pages=4, rows=4), recorder)
    runner.close()
    assert not recorder.steps
    assert "experts" in caplog.text
