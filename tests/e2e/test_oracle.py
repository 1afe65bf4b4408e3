"""Law number one: what the served stack answers equals transformers.generate, token for token, in float32.

Real separate processes, real transports, HTTP in front. `make oracle` runs the whole matrix (colocated and
shm in full, tcp and mooncake as a pairwise covering set); `make test` a subset with every family, page size,
chunk size and transport in it. tests/engine/test_oracle_mutations.py proves that the oracle can fail.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.reference import draw_model
from tools.local_stack import Stack, stack

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral")
PAGE_SIZES = (1, 16)
CHUNKS = (32, None)
OUTPUT_TOKENS = 64


class Case(NamedTuple):
    """One stack: a model family and how it is served."""

    model_type: str
    page_size: int
    chunk: int | None
    path: str  # "colocated" or a transfer backend

    def __str__(self) -> str:
        return f"{self.model_type}-page{self.page_size}-chunk{self.chunk or 'unlimited'}-{self.path}"


def full_matrix() -> list[Case]:
    """Colocated and shm: every combination. tcp and mooncake: every pair of values of any two axes."""
    cases = [Case(*values) for values in product(FAMILIES, PAGE_SIZES, CHUNKS, ("colocated", "shm"))]
    for i, family in enumerate(FAMILIES):
        page, chunk = i % 2, i // 2 % 2
        cases.append(Case(family, PAGE_SIZES[page], CHUNKS[chunk], "tcp"))
        cases.append(Case(family, PAGE_SIZES[1 - page], CHUNKS[1 - chunk], "mooncake"))
    return cases


SUBSET = [
    Case("llama", 16, 32, "tcp"),
    Case("qwen2", 1, 32, "shm"),
    Case("qwen3", 16, None, "shm"),
    Case("qwen3_moe", 16, 32, "mooncake"),
    Case("mistral", 1, None, "colocated"),
]


def parameters() -> list[object]:
    """The subset runs in `make test`, the rest of the matrix only where asked for."""
    rest = [case for case in full_matrix() if case not in SUBSET]
    return [
        *(pytest.param(case, id=str(case), marks=pytest.mark.oracle) for case in SUBSET),
        *(pytest.param(case, id=str(case), marks=pytest.mark.oracle_full) for case in rest),
    ]


class Question(NamedTuple):
    """A prompt and what transformers answers."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Model:
    """A tiny model and its questions: one cold, one that shares its first 64 tokens, eight at once."""

    path: Path
    cold: Question
    cousin: Question
    crowd: list[Question]


def draw(model_type: str, directory: Path) -> Model:
    """A model whose answers are clear, from a seed that moves on until they are."""
    rng = random.Random(f"oracle {model_type}")

    def tokens(count: int) -> list[int]:
        return [rng.randrange(256) for _ in range(count)]

    cold = tokens(77)
    shared = tokens(48)
    crowd = [
        (shared if i % 2 else []) + tokens(count) for i, count in enumerate((1, 5, 16, 17, 31, 33, 64, 90))
    ]
    prompts = [cold, cold[:64] + tokens(9), *crowd]
    path, answers = draw_model(model_type, directory, 1, prompts, OUTPUT_TOKENS)
    questions = [Question(*pair) for pair in zip(prompts, answers, strict=True)]
    return Model(path, questions[0], questions[1], questions[2:])


_models: dict[str, Model] = {}


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("oracle-models")


@pytest.fixture(scope="module", params=parameters())
def case(request: pytest.FixtureRequest) -> Case:
    assert isinstance(request.param, Case)
    return request.param


@pytest.fixture(scope="module")
def model(case: Case, model_directory: Path) -> Model:
    if case.model_type not in _models:
        _models[case.model_type] = draw(case.model_type, model_directory)
    return _models[case.model_type]


@pytest.fixture(scope="module")
def served(case: Case, model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    split = case.path != "colocated"
    options = {"kv_transfer_backend": case.path} if split else {}
    with stack(
        model.path,
        tmp_path_factory.mktemp("stack"),
        prefill=int(split),
        decode=1,
        router={"prefill_on_decode_tokens": 0},
        dtype="float32",
        threads=1,
        page_size=case.page_size,
        chunked_prefill_size=case.chunk,
        max_total_tokens=2048,
        kv_checksums=case.path == "tcp",
        **options,
    ) as running:
        yield running
        running.settle()


def test_oracle_cold(served: Stack, model: Model) -> None:
    answer = served.generate(model.cold.prompt, OUTPUT_TOKENS)
    assert answer["output_ids"] == model.cold.answer
    assert answer["meta_info"]["cached_tokens"] == 0


def test_oracle_cached_prefix(served: Stack, model: Model) -> None:
    for question in (model.cold, model.cousin):
        answer = served.generate(question.prompt, OUTPUT_TOKENS)
        assert answer["output_ids"] == question.answer
        assert answer["meta_info"]["cached_tokens"] >= 64


def test_oracle_eight_concurrent(served: Stack, model: Model) -> None:
    answers = served.generate_all([question.prompt for question in model.crowd], OUTPUT_TOKENS)
    assert [answer["output_ids"] for answer in answers] == [question.answer for question in model.crowd]
