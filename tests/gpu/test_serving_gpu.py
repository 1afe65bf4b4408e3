"""Requests over HTTP through router, prefill and decode worker, each a process on the GPU: float32 tokens are
`transformers.generate`'s, and every pool balances."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import PROMPTS, Drawn
from tests.harness.local_stack import stack

OUTPUTS = 40
PATHS = ["colocated", "cuda_ipc", "tcp"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_tokens_equal_generate(family: str, path: str, drawn: Drawn, device: str, tmp_path: Path) -> None:
    model, expected = drawn(family)
    split: dict[str, Any] = (
        {} if path == "colocated" else {"kv_transfer_backend": path, "max_total_tokens": 4096}
    )
    with stack(
        model,
        tmp_path,
        prefill=int(path != "colocated"),
        decode=1,
        router={"prefill_on_decode_tokens": 0},
        device=device,
        dtype="float32",
        page_size=16,
        chunked_prefill_size=48,
        gpu_memory_utilization=0.2,
        **split,
    ) as running:
        for _ in range(2):  # the second time from the cache
            answers = running.generate_all(PROMPTS, OUTPUTS)
            assert [answer["output_ids"] for answer in answers] == [answer[:OUTPUTS] for answer in expected]
        running.settle()
