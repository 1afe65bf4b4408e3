"""Threads of torch and of the kernels in forwards of few and of many tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.cpu.threads import FEW_TOKENS, few_tokens, kernel_threads


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_torch_computes_few_tokens_on_one_thread_and_the_kernels_on_all() -> None:
    with few_tokens(FEW_TOKENS):
        assert (torch.get_num_threads(), kernel_threads()) == (1, 3)
    assert (torch.get_num_threads(), kernel_threads()) == (3, 3)


def test_many_tokens_are_computed_on_all_threads() -> None:
    with few_tokens(FEW_TOKENS + 1):
        assert (torch.get_num_threads(), kernel_threads()) == (3, 3)


def test_a_forward_that_fails_leaves_the_threads_as_they_were() -> None:
    with pytest.raises(RuntimeError), few_tokens(1):
        raise RuntimeError
    assert (torch.get_num_threads(), kernel_threads()) == (3, 3)


def test_a_worker_of_one_thread_has_one() -> None:
    torch.set_num_threads(1)
    with few_tokens(1):
        assert (torch.get_num_threads(), kernel_threads()) == (1, 1)
