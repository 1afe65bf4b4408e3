"""Real processes: two tenants share a system prompt that the operator has named, from the first request on,
with and without other sharing. What is marked private never becomes public. Every answer equals
transformers.generate.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from router.text.chat import Chat
from router.text.tokenization import Tokenization
from tests.harness.local_stack import Stack, stack
from tests.support.reference import draw_model
from tests.support.tiny_models import write_tokenizer

PAGE, NEW_TOKENS = 8, 8
HEADER = "X-Baton-Tenant"
EPOCH_S, LONGEST_S = 0.5, 30.0
SYSTEM = "You answer for the library of the city. Be brief; name the shelf, the book and its page."
OWN = "Where do I find something about the tides of the northern sea, and its ships? I am tenant "


def messages(tenant: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": OWN + tenant}]


SAME = [{"role": "user", "content": OWN * 2}]  # of several tenants, marked
CONTROL = [{"role": "user", "content": "And who wrote the oldest book of all that you have on your shelves?"}]


def ask(running: Stack, chat: list[dict[str, str]], tenant: str, **more: Any) -> tuple[list[int], int]:
    """The answer's tokens, and how many of the prompt's were cached."""
    body = {
        "messages": chat, "max_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True,
        "return_token_ids": True, **more,
    }  # fmt: skip
    answer = running.http.post("/v1/chat/completions", json=body, headers={HEADER: tenant} if tenant else {})
    assert answer.status_code == 200, answer.text
    said = answer.json()
    return said["choices"][0]["token_ids"], said["usage"]["prompt_tokens_details"]["cached_tokens"]


def wait_until_public(running: Stack, page: list[int]) -> None:
    """Until these tokens are a public page of each worker."""
    running.settle()
    deadline = time.monotonic() + LONGEST_S

    def has_it(node: dict[str, Any]) -> bool:
        tokens = node["tokens"]
        return not node["tenant"] and any(tokens[i : i + PAGE] == page for i in range(0, len(tokens), PAGE))

    for worker in running.workers:
        while not any(map(has_it, running.inspect(worker, "nodes"))):
            assert time.monotonic() < deadline, "it does not become public"


@pytest.mark.parametrize(
    ("family", "users"),
    [("qwen3", 0), ("qwen3", 2), ("gemma3_text", 2), ("qwen3_next", 2), ("qwen3_next", 0)],
)
def test_what_is_named_is_shared_at_once_and_what_is_marked_never(
    family: str, users: int, tmp_path: Path
) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    write_tokenizer(tokenizer)
    encode = Tokenization(tokenizer).encode_chat
    chats = {tenant: messages(tenant) for tenant in "ab"}
    prompts = {name: encode(Chat(chat)) for name, chat in {**chats, "same": SAME, "control": CONTROL}.items()}
    model, answers = draw_model(family, tmp_path / "models", 1, list(prompts.values()), NEW_TOKENS)
    right = dict(zip(prompts, answers, strict=True))
    with stack(
        model,
        tmp_path / "run",
        1,
        1,
        router={
            "trusted_tenant_header": HEADER,
            "prefill_on_decode_tokens": 0,
            "public_prefixes": [{"text": SYSTEM}],
        },
        dtype="float32",
        threads=1,
        page_size=PAGE,
        mamba_track_interval=PAGE,
        max_total_tokens=4096,
        max_running_requests=4,
        sharing_min_tenants=users,
        sharing_epoch_s=EPOCH_S,
    ) as running:
        assert ask(running, chats["a"], "a") == (right["a"], 0)
        tokens, cached = ask(running, chats["b"], "b")
        assert tokens == right["b"]
        system = len(encode(Chat(messages("")[:1], add_generation_prompt=False)))
        common = next(i for i, (x, y) in enumerate(zip(prompts["a"], prompts["b"], strict=False)) if x != y)
        assert system - 2 * PAGE < cached <= system + PAGE < common, "not what the operator has named"
        tokens, cached = ask(running, chats["a"], "c")
        shared = common if users else system + PAGE  # what a and b have asked may be public by now
        assert (tokens, cached <= shared) == (right["a"], True), "a's own pages are a's"
        running.settle()

        for tenant in ("a", "b", "c", "d", "e", ""):
            tokens, cached = ask(running, SAME, tenant, private_from_page=0)
            assert tokens == right["same"]
            assert cached <= PAGE, "nobody has it but its tenant"
        if users:
            for tenant in "abc":
                assert ask(running, CONTROL, tenant)[0] == right["control"]
            wait_until_public(running, prompts["control"][2 * PAGE : 3 * PAGE])
            assert ask(running, CONTROL, "g")[1] > 0, "the workers do not share at all"
        for tenant, has_it in (("f", False), ("", False), ("a", True)):
            tokens, cached = ask(running, SAME, tenant)
            assert tokens == right["same"]
            assert (cached > PAGE) == has_it
        running.settle()
        for worker in running.workers:
            for node in running.inspect(worker, "nodes"):
                assert node["tenant"] or not node["permanently_private"]
