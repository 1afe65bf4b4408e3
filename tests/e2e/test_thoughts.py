"""Thoughts that end after so many tokens, through the whole stack: P and D apart, steps that overlap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_thoughts import reference
from tests.harness.local_stack import Stack, stack
from wire.request import ThoughtLimit

LENGTH = 40


def ask(running: Stack, **fields: Any) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": "Why?"}],
        "max_tokens": LENGTH,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = running.http.post("/v1/chat/completions", json={**body, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.oracle
def test_thoughts_end_where_transformers_ends_them(tiny_model: Path, tmp_path: Path) -> None:
    """The router is told that outputs begin with thoughts; a random model never ends them by itself."""
    with stack(
        tiny_model,
        tmp_path,
        prefill=1,
        decode=1,
        router={"prefill_on_decode_tokens": 0, "reasoning_parser": "qwen3-thinking"},
        dtype="float32",
        threads=1,
        page_size=16,
        chunked_prefill_size=32,
        max_total_tokens=4096,
        kv_transfer_backend="tcp",
        overlap_depth=1,
    ) as running:
        tag = running.http.post("/tokenize", json={"prompt": "</think>", "add_special_tokens": False}).json()
        closing = tuple(tag["tokens"])
        free = ask(running)
        prompt = free["prompt_token_ids"]
        assert free["usage"]["completion_tokens_details"]["reasoning_tokens"] == LENGTH
        for budget in (0, 1, 13):
            answer = ask(running, thinking_token_budget=budget)
            (choice,) = answer["choices"]
            want = reference(tiny_model, prompt, ThoughtLimit(budget, closing), LENGTH)
            assert choice["token_ids"] == want
            assert tuple(choice["token_ids"][budget : budget + len(closing)]) == closing
            assert choice["token_ids"][:budget] == free["choices"][0]["token_ids"][:budget]
            details = answer["usage"]["completion_tokens_details"]
            assert details["reasoning_tokens"] == budget + len(closing)
            assert choice["message"]["content"]
        running.settle()
