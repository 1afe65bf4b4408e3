"""Real processes: a forgotten tenant finds nothing that it cached, on P, D or in storage, also after all were
started again; others find theirs, and every answer equals transformers.generate.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from kvcache.storage.keys import visibility
from tests.harness.local_stack import Stack, stack
from tests.support.reference import draw_model

PAGE, NEW_TOKENS, PROMPT = 8, 8, 96
HEADER = "X-Baton-Tenant"
SECONDS = 30.0


def ask(running: Stack, prompt: list[int], tenant: str, right: list[int]) -> int:
    """Cached tokens of a prompt."""
    params = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": NEW_TOKENS}
    body = {"input_ids": prompt, "sampling_params": params}
    answer = running.http.post("/generate", json=body, headers={HEADER: tenant})
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    assert said["output_ids"] == right
    return int(said["meta_info"]["cached_tokens"])


def files(directory: Path, tenant: str) -> int:
    return len(list(directory.glob(f"??/{visibility(tenant).decode()}*")))


def wait_for(directory: Path, tenant: str, least: int) -> None:
    deadline = time.monotonic() + SECONDS
    while files(directory, tenant) < least:
        assert time.monotonic() < deadline, "nothing is stored"
        time.sleep(0.1)


def test_a_forgotten_tenant_finds_nothing_and_others_all(tmp_path: Path) -> None:
    draw = random.Random(59)
    prompts = [[draw.randrange(250) for _ in range(PROMPT)]]
    model, (right,) = draw_model("qwen3", tmp_path / "models", 1, prompts, NEW_TOKENS)
    (prompt,), stored, generations = prompts, tmp_path / "kv", tmp_path / "generations"

    def start(number: int) -> Any:
        return stack(
            model, tmp_path / f"run{number}", 1, 1,
            router={
                "trusted_tenant_header": HEADER, "prefill_on_decode_tokens": 0,
                "tenant_generations": str(generations),
            },
            dtype="float32", threads=1, page_size=PAGE, max_total_tokens=2048, max_running_requests=4,
            hicache_ratio=2.0, hicache_storage_backend="file", hicache_storage_path=str(stored),
            hicache_storage_prefetch_threshold=1, hicache_storage_prefetch_if_slower=True,
            hicache_storage_prefetch_policy="wait_complete",
        )  # fmt: skip

    with start(1) as running:
        for tenant in ("a", "b"):
            assert ask(running, prompt, tenant, right) == 0
        assert ask(running, prompt, "a", right) > 0
        running.settle()
        wait_for(stored, "a", PROMPT // PAGE)
        wait_for(stored, "b", PROMPT // PAGE)
        kept = {path: path.read_bytes() for path in stored.glob(f"??/{visibility('a').decode()}*")}
        said = running.admin.post("/admin/tenants/a/forget").json()
        assert (said["told"], said["silent"], len(said["workers"])) == (True, [], 2)
        assert all(one["problem"] == "" for one in said["workers"].values())
        assert sum(one["removed"]["device"]["pages"] for one in said["workers"].values()) >= PROMPT // PAGE
        assert files(stored, "a") == 0
        assert ask(running, prompt, "a", right) == 0
        assert ask(running, prompt, "b", right) > 0
        running.settle()
        wait_for(stored, "b", PROMPT // PAGE)
        again = running.admin.post("/admin/tenants/a/forget").json()
        assert again["generation"] > said["generation"]
        running.settle()
    for path, blob in kept.items():  # as if all had ended before it was removed
        path.write_bytes(blob)
    with start(2) as running:
        assert ask(running, prompt, "b", right) > 0, "storage outlives all processes"
        assert ask(running, prompt, "a", right) == 0
        deadline = time.monotonic() + SECONDS
        while files(stored, "a"):
            assert time.monotonic() < deadline, "the removal is not resumed"
            time.sleep(0.1)
        running.settle()
