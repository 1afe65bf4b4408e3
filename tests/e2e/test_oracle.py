"""Law number one: what the served stack answers equals transformers.generate, token for token, in float32.

Real separate processes, real transports, HTTP in front. `make oracle` runs the whole matrix: for dense
families colocated and shm in full, tcp and mooncake as a pairwise covering set; for those with latents,
windows and states a pairwise covering set of everything; and for workers of several ranks a stack of each
family. `make test` runs a subset with every family, page size, chunk size and transport in it.
tests/engine/test_oracle_mutations.py proves that the oracle can fail.

The tiny models' window is 24 tokens and a state is kept every 32: chunks of 20 and of 56 cut both, and pages.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from engine.parallel.shard import FAMILIES as DIVIDED
from tests.harness.local_stack import Stack, stack
from tests.support.oracle import (
    DENSE,
    EVERY,
    HYBRID,
    INDEXED,
    LATENT,
    SIMILAR,
    STATEFUL,
    WINDOWED,
    covering,
    pairs_of,
)
from tests.support.reference import draw_model
from tests.support.tiny_configs import CHUNK

PATHS = ("colocated", "shm", "tcp", "mooncake")
OUTPUT_TOKENS = 48
CROWD_TOKENS = 32  # of each of eight: what transformers takes for them is half of the time of a case


class Case(NamedTuple):
    """One stack: a model family and how it is served."""

    model_type: str
    page_size: int
    chunk: int | None
    path: str  # "colocated" or a transfer backend
    overlap: int = 0
    prefix_cache: str = "radix"
    tp_sizes: tuple[int, int] = (1, 1)  # of prefill and decode workers

    def __str__(self) -> str:
        chunk = self.chunk or "unlimited"
        more = "-overlap" * self.overlap + "-uncached" * (self.prefix_cache == "none")
        more += "-tp{}to{}".format(*self.tp_sizes) * (self.tp_sizes != (1, 1))
        return f"{self.model_type}-page{self.page_size}-chunk{chunk}-{self.path}{more}"


DENSE_PAGES, DENSE_CHUNKS = (1, 16), (32, None)
FAMILIES = (*LATENT, *INDEXED, *WINDOWED, *HYBRID)
AXES = [FAMILIES, (1, 16, 64), (20, 56, None), PATHS, (0, 1), ("radix", "none")]

TP_SIZES = ((1, 2), (2, 1), (2, 2))


def cases_of_ranks() -> list[Case]:
    """A stack with workers of several ranks for each family that they compute."""
    cases = []
    for i, family in enumerate(one for one in EVERY if one.removesuffix("_window") in DIVIDED):
        size, chunk = (1, 16)[i % 2], (20, None)[i // 2 % 2]
        cases.append(Case(family, size, chunk, PATHS[i % 4], i // 4 % 2, tp_sizes=TP_SIZES[i % 3]))
    return cases


def cases_of_similar() -> list[Case]:
    """Two stacks for each family that differs from another in its layers alone: one as it comes, and one with
    several ranks."""
    cases = []
    for i, family in enumerate(SIMILAR):
        size, chunk = (1, 16, 64)[i % 3], (20, 56, None)[i // 2 % 3]
        cases.append(Case(family, size, chunk, PATHS[i % 4], i // 4 % 2))
        if family in DIVIDED:
            cases.append(Case(family, 16, 32, PATHS[(i + 1) % 4], tp_sizes=TP_SIZES[i % 3]))
    return cases


def _page_size(family: str, size: int) -> int:
    """Pages of Llama 4 divide its chunks of attention."""
    return min(size, CHUNK) if family == "llama4_text" else size


def full_matrix() -> list[Case]:
    """See above."""
    dense = product(DENSE, DENSE_PAGES, DENSE_CHUNKS, ("colocated", "shm"))
    cases = [Case(*values) for values in dense]
    for i, family in enumerate(DENSE):
        page, chunk = i % 2, i // 2 % 2
        cases.append(Case(family, DENSE_PAGES[page], DENSE_CHUNKS[chunk], "tcp"))
        cases.append(Case(family, DENSE_PAGES[1 - page], DENSE_CHUNKS[1 - chunk], "mooncake"))
    cases += [Case(family, _page_size(family, size), *rest) for family, size, *rest in covering(AXES)]  # type: ignore[arg-type]
    return cases + cases_of_ranks() + cases_of_similar()


SUBSET = [
    Case("llama", 16, 32, "tcp"),
    Case("qwen2", 1, 32, "shm"),
    Case("qwen3", 16, None, "shm"),
    Case("qwen3_moe", 16, 32, "mooncake"),
    Case("mistral", 1, None, "colocated"),
    Case("mixtral", 16, 32, "shm"),
    Case("phi3", 1, 32, "tcp"),
    Case("qwen2_moe", 16, None, "mooncake"),
    Case("deepseek_v2", 16, None, "tcp", overlap=1),
    Case("deepseek_v3", 64, 20, "shm"),
    Case("deepseek_v32", 16, 20, "tcp"),
    Case("mistral_window", 16, 20, "mooncake", overlap=1),
    Case("gemma2", 16, 20, "shm", overlap=1),
    Case("gemma3_text", 1, 56, "shm"),
    Case("gemma4_text", 16, 20, "mooncake", overlap=1),
    Case("gpt_oss", 16, 56, "tcp"),
    Case("llama4_text", 16, 20, "shm", overlap=1),
    Case("deepseek_v4", 16, 20, "tcp", overlap=1),
    Case("minimax_m3_vl_text", 16, 20, "tcp", overlap=1),
    Case("qwen3_next", 16, 20, "shm", overlap=1),
    Case("qwen3_5_text", 1, 56, "mooncake"),
    Case("qwen3_5_moe_text", 64, 20, "tcp"),
    Case("falcon_h1", 64, None, "colocated"),
    Case("kimi_linear", 16, 20, "tcp", overlap=1),
    Case("bailing_hybrid", 16, 20, "shm"),
    Case("glm5_next_text", 16, 20, "mooncake", overlap=1),
    Case("lfm2", 16, 56, "tcp"),
    Case("lfm3", 16, 20, "shm", overlap=1),
    Case("glm4_moe", 16, 20, "mooncake"),
    Case("qwen3", 16, 20, "tcp", overlap=1, tp_sizes=(2, 1)),
    Case("qwen3_next", 16, 20, "shm", tp_sizes=(1, 2)),
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
    lengths = [OUTPUT_TOKENS] * 2 + [CROWD_TOKENS] * len(crowd)
    path, answers = draw_model(model_type, directory, 1, prompts, lengths)
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
        router={"prefill_on_decode_tokens": 0, "max_queued": 0},
        dtype="float32",
        threads=1,
        page_size=case.page_size,
        chunked_prefill_size=case.chunk,
        max_total_tokens=2048,
        mamba_track_interval=max(32, case.page_size),
        overlap_depth=case.overlap,
        prefix_cache=case.prefix_cache,
        kv_checksums="all" if case.path == "tcp" else "sampled",
        by_role={
            role: {"tp_size": size} for role, size in zip(("prefill", "decode"), case.tp_sizes, strict=True)
        },
        **options,
    ) as running:
        yield running
        running.settle()


def test_oracle_cold(served: Stack, model: Model) -> None:
    answer = served.generate(model.cold.prompt, OUTPUT_TOKENS)
    assert answer["output_ids"] == model.cold.answer
    assert answer["meta_info"]["cached_tokens"] == 0


def test_oracle_cached_prefix(served: Stack, model: Model, case: Case) -> None:
    """A repeat hits, and so does a cousin; with states from its second time on, when there is one for it."""
    served.generate(model.cold.prompt, 1)  # the test before may have run on another job, over its own stack
    for time, question in enumerate((model.cold, model.cousin, model.cousin)):
        answer = served.generate(question.prompt, OUTPUT_TOKENS)
        assert answer["output_ids"] == question.answer
        cached = answer["meta_info"]["cached_tokens"]
        if case.prefix_cache == "none":
            assert cached == 0
        elif case.model_type not in STATEFUL or time != 1:
            assert cached >= 64


def test_oracle_eight_concurrent(served: Stack, model: Model) -> None:
    answers = served.generate_all([question.prompt for question in model.crowd], CROWD_TOKENS)
    assert [answer["output_ids"] for answer in answers] == [question.answer for question in model.crowd]


@pytest.mark.oracle
def test_oracle_leaves_no_pair_out() -> None:
    """Any two values of the new families' axes are served together by some stack."""
    met = set().union(*(pairs_of(case) for case in full_matrix() if case.model_type in AXES[0]))
    every = (
        ((i, a), (j, b))
        for i, first in enumerate(AXES)
        for j, second in enumerate(AXES[:i])
        for a, b in product(first, second)
    )
    refused = {((0, one), (1, size)) for one, size in product(*AXES[:2]) if _page_size(one, size) != size}
    assert {(second, first) for first, second in every} - met == refused
    assert {case.model_type for case in SUBSET} >= set(EVERY)
    assert {case.path for case in SUBSET} == set(PATHS)
