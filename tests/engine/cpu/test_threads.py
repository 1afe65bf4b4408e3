"""Threads of torch and of the kernels in forwards of few and of many tokens."""

from __future__ import annotations

import subprocess
import sys
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


WITHOUT_ROOM = """
import resource
import torch
from engine.cpu.argmax import argmax_by_kernel

torch.set_num_threads(1)
logits = torch.randn(64, 32_000)
first, _ = argmax_by_kernel(logits)
pages = int(open("/proc/self/statm").read().split()[0])
bound = pages * resource.getpagesize() + (4 << 20)  # a thread's stack takes 8 MiB
resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
torch.set_num_threads(8)
again, _ = argmax_by_kernel(logits)
again, _ = argmax_by_kernel(logits)
print(again.equal(first))
"""


def test_a_thread_that_cannot_start_is_done_without() -> None:
    """An exception that leaves a kernel would end the process, and all its requests."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ROOM], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert done.stderr.count("cannot start") == 1
