"""The largest score of each row: the kernel finds what torch does."""

from __future__ import annotations

import math

import pytest
import torch

from engine.argmax import argmax, finite_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # the last one has no kernel


def draw(rows: int, vocab: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_as_torch(scores: torch.Tensor) -> None:
    got = argmax(scores)
    assert got.tokens.tolist() == scores.argmax(-1).tolist()
    assert got.is_finite.tolist() == scores.isfinite().all(-1).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 1023, 1024, 1025, 40_000])
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_of_random_scores(rows: int, vocab: int, dtype: torch.dtype) -> None:
    same_as_torch(draw(rows, vocab, dtype))
    same_as_torch(-draw(rows, vocab, dtype).abs())


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_equal_scores_it_is_the_first(dtype: torch.dtype) -> None:
    scores = torch.zeros(4, 3000, dtype=dtype)
    scores[1, 7:] = 1
    scores[2, [2100, 2200, 2999]] = 2
    scores[3] = -math.inf
    assert argmax(scores).tokens.tolist() == [0, 7, 2100, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_found_at_every_place(dtype: torch.dtype) -> None:
    assert argmax(torch.eye(2500, dtype=dtype)).tokens.tolist() == list(range(2500))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 1024, 1999])
def test_a_row_that_is_not_finite_is_told(dtype: torch.dtype, place: int, value: float) -> None:
    scores = draw(3, 2000, dtype)
    scores[1, place] = value
    got = argmax(scores)
    assert got.is_finite.tolist() == finite_rows(scores).tolist() == [True, False, True]
    assert 0 <= got.tokens[1] < 2000
    if not math.isnan(value):
        assert got.tokens.tolist() == scores.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_be_parts_of_others_or_none(dtype: torch.dtype) -> None:
    scores = draw(6, 300, dtype)
    same_as_torch(scores[:, 20:250])
    same_as_torch(scores[1::2])
    same_as_torch(scores.t())
    same_as_torch(scores[:0])


def test_many_scores_are_divided_among_threads() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        same_as_torch(draw(3, 300_000, torch.bfloat16))
    finally:
        torch.set_num_threads(threads)


def test_the_largest_finite_scores_are_finite() -> None:
    """Their sum is not."""
    largest = torch.finfo(torch.float32).max
    assert argmax(torch.full((1, 64), largest)).is_finite.tolist() == [True]
