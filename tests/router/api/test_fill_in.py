"""Completions with a suffix: what stands between two texts, in the form that the model reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from router.text.fill_in import FILL_IN_FORMS, FillInForm, fill_in_form
from router.text.tokenization import Tokenization
from tests.router.conftest import RouterProcess, start_router
from tests.support.fake_worker import FakeWorker
from tests.support.tokenizers import byte_level
from wire.codec import unpack_tokens
from wire.messages.rooms import Decode
from wire.records import Role

QWEN, _, DEEPSEEK, _, SEED, CODESTRAL = FILL_IN_FORMS


@pytest.fixture(scope="module")
def code_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With Qwen's tokens; its tokenizer puts a bos before a text."""
    path = byte_level(tmp_path_factory.mktemp("code"), bos=True)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in QWEN.tokens])
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, code_model: Path
) -> Iterator[tuple[RouterProcess, FakeWorker]]:
    router = start_router(tmp_path_factory.mktemp("fill_in"), code_model)
    worker = FakeWorker(Role.DECODE, router.mailbox, max_context=512, step_s=0.001)
    router.wait_for_workers(1)
    yield router, worker
    worker.close()
    assert router.stop() == 0


def complete(router: RouterProcess, **fields: Any) -> Any:
    return router.http.post("/v1/completions", json={"max_tokens": 2, "suffix": "\n}", **fields})


def test_each_form_has_the_parts_where_the_model_reads_them() -> None:
    assert QWEN.prompt("a", "b") == "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    assert DEEPSEEK.prompt("a", "b") == "<｜fim▁begin｜>a<｜fim▁hole｜>b<｜fim▁end｜>"
    assert SEED.prompt("a", "b") == "<[fim-suffix]>b<[fim-prefix]>a<[fim-middle]>"
    assert CODESTRAL.prompt("a", "b") == "[SUFFIX]b[PREFIX]a"
    assert CODESTRAL.tokens == ("[PREFIX]", "[SUFFIX]")


@pytest.mark.parametrize("form", FILL_IN_FORMS, ids=lambda form: form.prefix)
def test_a_model_reads_the_form_whose_tokens_it_has(form: FillInForm) -> None:
    assert fill_in_form(["<s>", *form.tokens, "[PAD]"]) is form
    assert fill_in_form(form.tokens[1:]) is None  # not all of them
    assert fill_in_form([]) is None


@pytest.mark.parametrize("prompt", ["f() {", ["f() {"], ["f() {", "g() {"]], ids=["text", "list", "two"])
def test_prompt_and_suffix_are_one_prompt(
    service: tuple[RouterProcess, FakeWorker], code_model: Path, prompt: str | list[str]
) -> None:
    router, worker = service
    before = len(worker.seen)
    answer = complete(router, prompt=prompt)
    assert answer.status_code == 200, answer.text
    texts = [prompt] if isinstance(prompt, str) else prompt
    sent = [message.request.prompt for message in worker.seen[before:] if isinstance(message, Decode)]
    tokenizer = Tokenization(code_model)
    expected = [tokenizer.encode(QWEN.prompt(text, "\n}")) for text in texts]
    assert sorted(map(list, map(unpack_tokens, sent))) == sorted(expected)
    assert answer.json()["usage"]["prompt_tokens"] == sum(map(len, expected))
    marks = [tokenizer.added_ids()[token] for token in ("<|begin|>", *QWEN.tokens)]
    assert all([token for token in ids if token in marks] == marks for ids in expected)


def test_a_suffix_that_cannot_be_followed_is_named(service: tuple[RouterProcess, FakeWorker]) -> None:
    router, _ = service
    for param, fields in (
        ("suffix", {"prompt": "a", "echo": True}),
        ("suffix", {"prompt": "a", "truncate_prompt_tokens": 3}),
        ("prompt", {"prompt": [1, 2]}),
        ("prompt", {"prompt": [[1, 2]]}),
        ("prompt", {"prompt": []}),
        ("suffix", {"prompt": ["a"] * 256, "suffix": "x" * 100_000}),
    ):
        answer = complete(router, **fields)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param, answer.text
    assert "a prompt is a text" in complete(router, prompt=[1, 2]).json()["error"]["message"]
    too_long = complete(router, prompt="a", suffix="word " * 600)
    assert too_long.status_code == 400
    assert too_long.json()["error"]["code"] == "context_length_exceeded"
