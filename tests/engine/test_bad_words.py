"""Words that an output may not have, against transformers.generate with the same ones."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from common.errors import InvalidRequest
from engine.bad_words import BadWords
from engine.errors import NothingAllowed
from scheduler.req import Req, RequestLimits
from tests.support.driver import Driver, open_runner
from tests.support.reference import generate_with
from tests.support.tiny_models import make_tiny
from wire.codec import pack_tokens
from wire.request import GenerateRequest, SamplingParams

WORDS = ((7,), (3, 4, 5), (4, 6))


@pytest.mark.parametrize(
    ("outputs", "banned"),
    [([], [7]), ([3], [7]), ([4], [7, 6]), ([3, 4], [7, 5, 6]), ([4, 3], [7]), ([1, 2, 3, 4], [7, 5, 6])],
)
def test_the_last_token_is_banned_behind_the_others(outputs: list[int], banned: list[int]) -> None:
    words, count = BadWords(WORDS), len(outputs)
    assert words.banned(outputs, count, None) == banned
    assert words.banned([*outputs, 9, 9], count, None) == banned, "also when it is computed again"
    if outputs:
        assert words.banned(outputs[:-1], count, outputs[-1]) == banned


def test_a_token_that_is_not_known_is_not_guessed() -> None:
    assert BadWords([(7,)]).banned([], 2, None) == [7], "no other tokens matter"
    for newest in (None, 4):
        with pytest.raises(NothingAllowed):
            BadWords(WORDS).banned([1], 3, newest)
    with pytest.raises(NothingAllowed):
        BadWords(WORDS).banned([1], 2, None)


@pytest.mark.parametrize("words", [((),), ((1,) * 257,), ((1, 500),), ((1,),) * 257])
def test_what_is_no_word_is_refused(words: tuple[tuple[int, ...], ...]) -> None:
    request = GenerateRequest(
        request_id="r", room=1, epoch=0, prompt=pack_tokens([1, 2]), sampling=SamplingParams(bad_words=words)
    )
    with pytest.raises(InvalidRequest, match="bad_words"):
        Req.from_request(request, "m", RequestLimits(100, 300, ()))


def reference(path: Path, prompt: list[int], words: list[list[int]], n: int) -> list[int]:
    return generate_with(path, prompt, n, bad_words_ids=words or None)


@pytest.mark.parametrize("unknown", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_equal_generate_with_the_same_words(tmp_path: Path, overlap: bool, unknown: bool) -> None:
    """Of what a model says when it is free, some tokens and pairs of tokens are bad. Its prompts end with no
    beginning of these: transformers looks at prompts, too."""
    path, n = make_tiny("qwen3", tmp_path, 3), 16
    rng = random.Random(6)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (5, 33, 20)]
    free = [reference(path, prompt, [], n) for prompt in prompts]
    words = [[free[0][2:4], [free[0][8]]], [free[1][1:4], free[1][5:7]], []]
    assert all(
        len(word) == 1 or prompt[-1] != word[-2]
        for prompt, bad in zip(prompts, words, strict=True)
        for word in bad
    )
    runner, _ = open_runner(path, 16, 60, overlap=overlap)
    driver = Driver(runner, 60, 16)
    lanes = [
        driver.add(prompt, SamplingParams(temperature=0.0, bad_words=tuple(map(tuple, bad))))
        for prompt, bad in zip(prompts, words, strict=True)
    ]
    ours = driver.each_step(lanes, n, unknown)
    runner.close()
    assert ours == [reference(path, prompt, bad, n) for prompt, bad in zip(prompts, words, strict=True)]
    assert [one != other for one, other in zip(ours, free, strict=True)] == [True, True, False]
