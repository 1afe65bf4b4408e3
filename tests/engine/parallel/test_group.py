"""Ranks that exchange values over shared memory: sums in one order, and no wait without an end."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import pytest
import torch

from engine.parallel.group import _SLOT_BYTES, SharedMemoryGroup, allocate_memory, memory_bytes
from kvcache.buffers import SharedBuffer

T = TypeVar("T")
SIZES = [1, 7, 4096, _SLOT_BYTES // 4, _SLOT_BYTES // 2 + 5]


@contextmanager
def group_of(size: int, timeout_s: float = 20.0) -> Iterator[list[SharedMemoryGroup]]:
    """All ranks, in one process."""
    memory = allocate_memory(size)
    assert memory.fd is not None
    pairs = [socket.socketpair() for _ in range(1, size)]
    for pair in pairs:
        for end in pair:
            end.settimeout(timeout_s)
    group = [SharedMemoryGroup(0, memory, [ours for ours, _ in pairs], size)]
    for rank, (_, theirs) in enumerate(pairs, 1):
        mapped = SharedBuffer(os.dup(memory.fd), memory_bytes(size))
        group.append(SharedMemoryGroup(rank, mapped, [theirs], size))
    try:
        yield group
    finally:
        for one in group:
            one.close()


def on_all(group: list[SharedMemoryGroup], call: Callable[[SharedMemoryGroup], T]) -> list[T]:
    with ThreadPoolExecutor(len(group)) as pool:
        return list(pool.map(call, group))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_of_all_ranks_in_their_order_and_equal_on_each(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    with group_of(size) as group:
        for count in [*SIZES, *SIZES]:
            summands = [torch.randn(count, generator=generator).to(dtype) for _ in group]
            expected = summands[0].float()
            for summand in summands[1:]:
                expected = expected + summand.float()
            given = [summand.clone() for summand in summands]
            on_all(group, lambda one, given=given: one.sum(given[one.rank]))
            assert all(torch.equal(got, expected.to(dtype)) for got in given)


def test_values_of_rank_0_are_shared() -> None:
    with group_of(3) as group:
        for count in SIZES:
            values = [torch.arange(count) * (rank + 1) for rank in range(3)]
            on_all(group, lambda one, values=values: one.share(values[one.rank]))
            assert all(torch.equal(got, torch.arange(count)) for got in values)


def test_a_rank_may_be_far_ahead_or_behind() -> None:
    """Slots are not written again while another rank reads them."""

    def sums(one: SharedMemoryGroup) -> list[float]:
        found = []
        for turn in range(300):
            value = torch.full((_SLOT_BYTES // 64,), float(turn * (one.rank + 1)))
            one.sum(value)
            found.append(float(value.unique().item()))
        return found

    with group_of(3) as group:
        assert on_all(group, sums) == [[turn * 6.0 for turn in range(300)]] * 3


@pytest.mark.parametrize("gone", [0, 1])
def test_who_waits_for_a_rank_that_is_gone_gets_an_error(gone: int) -> None:
    with group_of(2) as group:
        group[gone].close()
        with pytest.raises(OSError):
            group[1 - gone].sum(torch.ones(3))


def test_who_waits_for_a_rank_that_does_not_come_gets_an_error() -> None:
    with group_of(2, timeout_s=0.1) as group, pytest.raises(TimeoutError):
        group[0].sum(torch.ones(3))


def test_who_has_come_and_waits_for_a_rank_that_ends_gets_an_error() -> None:
    with group_of(2) as group:
        group[0]._others[0].shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionResetError):
            group[1].sum(torch.ones(3))
