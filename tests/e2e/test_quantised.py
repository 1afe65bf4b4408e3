"""Quantised KV travels quantised: prefill and decode apart answer what one worker does, over fewer bytes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.asking import ask, timeline
from tests.harness.local_stack import stack

PAGE_SIZE = 16
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 24}
FORMS = [
    ("fp8_e4m3", "shm"),
    pytest.param("fp8_e5m2", "mooncake", marks=pytest.mark.oracle_full),
    pytest.param("fp4_e2m1", "tcp", marks=pytest.mark.oracle_full),
]
SHARE = {"fp8_e4m3": 1 / 4, "fp8_e5m2": 1 / 4, "fp4_e2m1": 9 / 64}
"""Of float32's bytes."""


def answers(model: Path, directory: Path, prefill: int, **options: Any) -> tuple[list[list[int]], list[Any]]:
    """Every prompt's tokens, asked twice, and what the traces say of the transfers."""
    rng = random.Random(31)
    prompts = [[rng.randrange(256) for _ in range(count)] for count in (90, 7, 64)]
    common = {"dtype": "float32", "threads": 1, "page_size": PAGE_SIZE, "max_total_tokens": 2048}
    router = {"prefill_on_decode_tokens": 0}
    tokens, moved = [], []
    with stack(model, directory, prefill=prefill, router=router, **common, **options) as running:
        (page_bytes,) = {
            worker["groups"][0]["page_bytes"]
            for worker in running.admin.get("/debug/workers").json()["workers"]
        }
        for i, prompt in enumerate(prompts * 2):
            answer = ask(running, prompt, GREEDY, {"X-Request-Id": f"r{i}"})
            tokens.append(answer["output_ids"])
            if prefill:
                moved.append(timeline(running, f"r{i}", lanes=3)["about"]["kv_bytes"] / page_bytes)
        running.settle()
    return tokens, [page_bytes, *moved]


@pytest.mark.parametrize(("form", "backend"), FORMS)
def test_quantised_pages_are_shipped_as_they_are(
    tiny_model: Path, tmp_path: Path, form: str, backend: str
) -> None:
    alone, (page_bytes,) = answers(tiny_model, tmp_path, 0, kv_cache_dtype=form)
    apart, (shipped_bytes, *moved) = answers(
        tiny_model, tmp_path, 1, kv_cache_dtype=form, kv_transfer_backend=backend, chunked_prefill_size=32
    )
    assert apart == alone
    full_bytes = 3 * 2 * 2 * PAGE_SIZE * 32 * 4  # layers, K and V, heads, tokens, head_dim, float32
    assert page_bytes == shipped_bytes == full_bytes * SHARE[form]
    assert moved == [6, 1, 4, 1, 1, 0], "whole pages that decode has cached do not travel again"
