"""The hand-off of real tiny models, each with other groups, both workers in this thread.

Quantised KV reads back what was stored, whoever stored it: so an answer is the same apart or not, cached or
not, chunked or not. Rooms that start again in mid-stream answer what transformers does.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from kvcache.quant import KVFormat
from router.directory.directory import Directory
from tests.support.hand_off import Pair, held, pair
from tests.support.reference import MIN_MARGIN, draw_model, reference_generate
from tests.support.tiny_configs import FAMILIES, MIXED
from tests.support.tiny_models import make_tiny, write_tiny
from wire.messages.directory import Announce, Announced, AnnounceRefused

pytestmark = pytest.mark.slow
FORMATS = [form.value for form in KVFormat if form is not KVFormat.AUTO]
QUANTISED = ("qwen3", "gpt_oss", "mistral_window", "deepseek_v2", "qwen3_next")
EXACT = ("deepseek_v3", "mistral_window", "gpt_oss", "qwen3_next", "falcon_h1")
CHANGED: list[dict[str, Any]] = [
    {"chunked_prefill_size": 24, "page_size": 8, "overlap_depth": 0},
    {"chunked_prefill_size": None, "page_size": 16, "overlap_depth": 1},
]
OUTPUT_TOKENS = 40
REAL: dict[str, Any] = {
    "engine": "transformers",
    "dtype": "float32",
    "threads": 1,
    "page_size": 8,
    "chunked_prefill_size": 24,
    "max_total_tokens": 1024,
    "mamba_track_interval": 16,
    "max_running_requests": 4,
}


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def quantisable(family: str, directory: Path) -> Path:
    """The tiny model, with latents that fill whole blocks of fp4."""
    if family != "deepseek_v2":
        return make_tiny(family, directory, 3)
    config = {**FAMILIES, **MIXED}[family]()
    config.kv_lora_rank = 40
    path = directory / "latents-of-whole-blocks"
    if not path.is_dir():
        write_tiny(config, path, 3)
    return path


def answer(both: Pair, room: int, prompt: list[int], split: bool) -> list[int]:
    both.ask(room, prompt, OUTPUT_TOKENS, split)
    both.run_dry()
    assert both.outputs[room].finish is not None, both.outputs[room].rejected
    return both.outputs[room].tokens


def quantised_cases() -> list[object]:
    """Every family with one of the formats and one of CHANGED; the other combinations are marked
    oracle_full."""
    cases = []
    for i, family in enumerate(QUANTISED):
        for j, form in enumerate(FORMATS):
            for k, changed in enumerate(CHANGED):
                marks = () if (i % len(FORMATS), i % 2) == (j, k) else pytest.mark.oracle_full
                cases.append(pytest.param(family, form, changed, marks=marks))
    return cases


@pytest.mark.parametrize(("family", "form", "changed"), quantised_cases())
def test_quantised_kv_answers_the_same_apart_or_not(
    models: Path, family: str, form: str, changed: dict[str, Any]
) -> None:
    options = {**REAL, "model": str(quantisable(family, models)), "kv_cache_dtype": form}
    prompt = prompt_of(5, 77)
    with pair(**options) as both:
        alone = answer(both, 1, prompt, split=False)
        both.settle(60.0)
    assert len(set(alone)) > OUTPUT_TOKENS // 6, "too dull to tell anything"
    with pair(**{**options, **changed}) as both:
        assert answer(both, 1, prompt, split=True) == alone, "apart"
        assert answer(both, 2, prompt, split=True) == alone, "apart, and cached on both sides"
        assert answer(both, 3, prompt, split=False) == alone, "decode alone, from what was sent"
        cousin = answer(both, 4, [*prompt[:64], *prompt_of(6, 9)], split=True)
        both.settle(60.0)
    with pair(**{**options, **changed, "prefix_cache": "none"}) as both:
        assert answer(both, 1, prompt, split=True) == alone, "apart, and never cached"
        assert answer(both, 4, [*prompt[:64], *prompt_of(6, 9)], split=False) == cousin
        both.settle(60.0)


@pytest.mark.parametrize("family", ["qwen3", "mistral_window", "deepseek_v2", "qwen3_next"])
def test_workers_that_store_kv_differently_refuse_each_other(models: Path, family: str) -> None:
    """The directory refuses by the option's name. Workers that meet without it refuse each other, too."""
    options = {**REAL, "model": str(quantisable(family, models)), "kv_cache_dtype": "fp8_e4m3"}
    prompt = prompt_of(7, 50)
    with pair(**options, prefill_differs={"kv_cache_dtype": "fp4_e2m1"}) as both:
        directory = Directory(3.0)
        assert isinstance(directory.announce(Announce(both.prefill.record()), 0.0), Announced)
        refused = directory.announce(Announce(both.decode.record()), 0.1)
        assert isinstance(refused, AnnounceRefused)
        assert refused.key == "kv_cache_dtype", refused.problem
        both.ask(1, prompt, OUTPUT_TOKENS)
        both.run_dry()
        rejected = both.outputs[1].rejected
        assert rejected is not None
        assert "lays its pages out differently" in rejected.message
        both.restart(1, split=False)
        both.run_dry()
        given = both.outputs[1].tokens
        both.settle(60.0)
    with pair(**options) as both:
        assert answer(both, 1, prompt, split=False) == given


# -- hybrids without states -------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "lfm2"])
def test_a_hybrid_whose_layers_all_attend(models: Path, family: str) -> None:
    """The pools' sizes are chosen by the worker, as when it is started."""
    config = MIXED[family]()
    config.layer_types = ["full_attention"] * 4
    path = models / f"{family}-attending"
    write_tiny(config, path, 4)
    prompt = prompt_of(15, 77)
    expected, margin = reference_generate(path, prompt, OUTPUT_TOKENS)
    assert margin >= MIN_MARGIN
    sizes = {"max_total_tokens": None, "kv_memory_fraction": 0.1, "max_running_requests": 2}
    with pair(**{**REAL, "model": str(path), **sizes}) as both:
        assert answer(both, 1, prompt, split=True) == expected, "apart"
        assert answer(both, 2, prompt, split=True) == expected, "apart, and cached on both sides"
        assert answer(both, 3, prompt, split=False) == expected, "decode alone, from what was sent"
        both.settle(60.0)


# -- rooms that start again ----------------------------------------------------------------------------


def seen(both: Pair, room: int, tokens: int) -> None:
    """Run until the router has `tokens` tokens of the room."""
    step = 0
    while both.outputs[room].open and len(both.outputs[room].tokens) < tokens:
        both.step(step)
        step += 1
        assert step < 100_000


def again_cases() -> list[Any]:
    """In `make test`: one family each with latents, windows and states, at overlap depth 1."""
    quick = {("deepseek_v3", 1), ("gpt_oss", 1), ("qwen3_next", 1)}
    return [
        pytest.param(*case, marks=() if case in quick else pytest.mark.oracle_full)
        for case in itertools.product(EXACT, (0, 1))
    ]


@pytest.mark.parametrize(("family", "depth"), again_cases())
def test_a_room_that_starts_again_in_mid_stream_goes_on_exactly(
    models: Path, family: str, depth: int
) -> None:
    """Several restarts, with and without prefill, beside other rooms, one of which is aborted."""
    prompts = [prompt_of(seed, length) for seed, length in ((11, 61), (12, 96), (13, 7))]
    path, answers = draw_model(family, models, 3, prompts, OUTPUT_TOKENS)
    with pair(**{**REAL, "model": str(path), "overlap_depth": depth}) as both:
        for room, prompt in enumerate(prompts):
            both.ask(room, prompt, OUTPUT_TOKENS)
        for split, tokens in ((True, 1), (False, 5), (True, 9), (True, 17), (True, 30)):
            for room in (0, 1):
                seen(both, room, tokens)
                assert both.outputs[room].tokens == answers[room][: len(both.outputs[room].tokens)]
                if both.outputs[room].open:
                    both.restart(room, split)
            for worker in (both.prefill, both.decode):
                held(worker)
        both.abort(2)
        both.run_dry()
        for room in (0, 1):
            both.insist(room)
        both.run_dry()
        assert [both.outputs[room].tokens for room in (0, 1)] == answers[:2]
        both.settle(60.0)
