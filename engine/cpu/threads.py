"""How many threads the kernels use, and torch beside them.

torch's own operators run on OpenMP threads, which spin for up to a millisecond after each operator that is
divided among them. On a machine whose cores all compute, they then hold the cores that the kernels' threads
need. A decode step has many small torch operators between kernels, so in a forward of few tokens torch
computes on one thread, and only the kernels use all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

FEW_TOKENS = 32
"""Up to this many tokens of a forward, dividing a torch operator gains less than its threads cost."""

_of_kernels: ContextVar[int | None] = ContextVar("threads of kernels", default=None)


def kernel_threads() -> int:
    """The number of threads for a kernel that is called now, on this thread."""
    return _of_kernels.get() or torch.get_num_threads()


@contextmanager
def few_tokens(tokens: int) -> Iterator[None]:
    """While the block runs a forward of `tokens` tokens, torch computes on one thread if they are few."""
    threads = torch.get_num_threads()
    if tokens > FEW_TOKENS or threads == 1:
        yield
        return
    token = _of_kernels.set(threads)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _of_kernels.reset(token)
