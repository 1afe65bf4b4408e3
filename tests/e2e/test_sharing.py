"""Real processes: a text that several tenants have computed is everybody's from the next epoch on, and what
each of them added stays its own. Every answer equals transformers.generate.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.harness.local_stack import Stack, stack
from tests.support.reference import draw_model

PAGE, NEW_TOKENS = 8, 8
COMMON_TOKENS, OWN_TOKENS = 80, 20
HEADER = "X-Baton-Tenant"
EPOCH_S = 30.0


def ask(running: Stack, prompt: list[int], tenant: str) -> dict[str, Any]:
    params = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": NEW_TOKENS}
    body = {"input_ids": prompt, "sampling_params": params}
    answer = running.http.post("/generate", json=body, headers={HEADER: tenant})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def wait_until_public(running: Stack) -> None:
    deadline = time.monotonic() + EPOCH_S
    for worker in running.workers:
        while not running.inspect(worker, "sharing")["public_pages"] >= COMMON_TOKENS // PAGE:
            assert time.monotonic() < deadline, "nothing becomes public"


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_next"])
def test_what_several_computed_is_everybodys(family: str, tmp_path: Path) -> None:
    draw = random.Random(19)
    common = [draw.randrange(250) for _ in range(COMMON_TOKENS)]
    tenants = ["a", "b", "c", "d"]
    prompts = [common + [draw.randrange(250) for _ in range(OWN_TOKENS)] for _ in tenants]
    model, answers = draw_model(family, tmp_path / "models", 1, prompts, NEW_TOKENS)
    with stack(
        model,
        tmp_path / "run",
        1,
        1,
        router={"trusted_tenant_header": HEADER, "prefill_on_decode_tokens": 0},
        dtype="float32",
        threads=1,
        page_size=PAGE,
        chunked_prefill_size=COMMON_TOKENS,
        mamba_track_interval=PAGE,
        max_total_tokens=2048,
        max_running_requests=4,
        sharing_min_tenants=2,
        sharing_epoch_s=0.5,
    ) as running:
        for tenant, prompt, right in zip(tenants[:3], prompts[:3], answers[:3], strict=True):
            asked = ask(running, prompt, tenant)
            assert asked["output_ids"] == right
            assert asked["meta_info"]["cached_tokens"] in (0, COMMON_TOKENS)
        running.settle()
        wait_until_public(running)
        for tenant, prompt, right in ((tenants[3], prompts[3], answers[3]), ("e", prompts[0], answers[0])):
            asked = ask(running, prompt, tenant)
            assert asked["output_ids"] == right
            assert asked["meta_info"]["cached_tokens"] == COMMON_TOKENS, "more, or less, than is everybody's"
        running.settle()
