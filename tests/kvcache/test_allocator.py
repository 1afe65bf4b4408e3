"""Allocators: all operations, all or nothing, against a model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvcache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator, make_allocator
from tests.scheduler.rig import Rig


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_pages_start_at_one_and_none_is_taken_when_short() -> None:
    allocator = PagedTokenToKVPoolAllocator(3, 4)
    first = allocator.alloc(8)
    assert first is not None
    assert first.dtype == np.int64
    assert first.tolist() == list(range(4, 12))
    assert allocator.alloc(8) is None
    assert allocator.available_size() == 4


def test_what_was_allocated_does_not_change_when_some_of_it_is_freed() -> None:
    allocator = make_allocator(4, 1)
    pages = allocator.alloc_pages(2)
    assert pages is not None
    allocator.free_page_ids(pages[1:])
    assert pages.tolist() == [1, 2]


def test_free_takes_each_page_of_a_run_once_and_the_last_one_may_be_partly_filled() -> None:
    allocator = PagedTokenToKVPoolAllocator(3, 4)
    allocator.alloc(12)
    allocator.free(ints(4, 5, 6, 7, 12))
    assert allocator.free_pages.tolist() == [1, 3]
    allocator.free(ints())
    assert allocator.free_pages.tolist() == [1, 3]


def test_need_sort_hands_out_long_runs_after_scattered_frees() -> None:
    allocator = TokenToKVPoolAllocator(8, need_sort=True)
    allocator.alloc(8)
    for slot in (7, 2, 5, 1, 6):
        allocator.free(ints(slot))
    assert allocator.release_pages.tolist() == [7, 2, 5, 1, 6]
    assert allocator.available_size() == 5
    slots = allocator.alloc(4)
    assert slots is not None
    assert slots.tolist() == [1, 2, 5, 6]
    assert allocator.release_pages.tolist() == []


def test_without_need_sort_the_page_free_longest_goes_first() -> None:
    allocator = TokenToKVPoolAllocator(4)
    allocator.alloc(3)
    allocator.free(ints(3, 1))
    slots = allocator.alloc(3)
    assert slots is not None
    assert slots.tolist() == [4, 3, 1]


def test_a_free_group_is_handed_over_at_its_end() -> None:
    allocator = TokenToKVPoolAllocator(4)
    allocator.alloc(4)
    allocator.free_group_begin()
    allocator.free(ints(2))
    allocator.free(ints(4))
    assert allocator.available_size() == 0
    assert allocator.pending_pages().tolist() == [2, 4]
    allocator.free_evicted(ints(3))
    assert allocator.free_pages.tolist() == [3], "what is evicted does not wait"
    assert allocator.free_group_take().tolist() == [2, 4]
    assert allocator.pending_pages().tolist() == []
    assert allocator.available_size() == 1
    allocator.free(ints(1))
    assert allocator.free_pages.tolist() == [3, 1]


def test_a_double_free_and_the_scratch_page_are_refused() -> None:
    allocator = PagedTokenToKVPoolAllocator(2, 4)
    allocator.alloc(4)
    allocator.free(ints(4))
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(ints(5))
    with pytest.raises(AssertionError, match="scratch"):
        allocator.free(ints(0))


@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_the_same_page_twice_in_one_free_is_refused_at_once(page_size: int, need_sort: bool) -> None:
    allocator = make_allocator(8, page_size, need_sort)
    slots = allocator.alloc(6 * page_size)
    assert slots is not None
    with pytest.raises(AssertionError, match=r"freed twice, by one free: \[2\]"):
        allocator.free(np.concatenate([slots[: 2 * page_size], slots[page_size:]]))


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_page_is_in_a_free_group_once(page_size: int) -> None:
    for again in ([2, 3], [3, 4, 4]):
        allocator = make_allocator(8, page_size)
        allocator.alloc(6 * page_size)
        allocator.free_group_begin()
        allocator.free_page_ids(ints(1, 2))
        with pytest.raises(AssertionError, match="freed twice"):
            allocator.free_page_ids(ints(*again))


def test_what_a_free_group_handed_over_is_freed_once() -> None:
    allocator = make_allocator(8, 4)
    allocator.alloc(6 * 4)
    allocator.free_group_begin()
    allocator.free_page_ids(ints(1, 2))
    taken = allocator.free_group_take()
    allocator.free_page_ids(taken)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free_page_ids(taken)


@pytest.mark.parametrize("groups", [("window",), ("state",)])
def test_the_other_groups_refuse_it_too(groups: tuple[str, ...]) -> None:
    rig = Rig(groups=groups)
    pages = rig.memory.allocators[groups[0]].alloc_pages(3)
    assert pages is not None
    with pytest.raises(AssertionError, match="freed twice, by one free"):
        rig.memory.free({groups[0]: pages[[0, 1, 1]]})
    row = rig.memory.req_to_token_pool.alloc(1)
    with pytest.raises(AssertionError, match="is free already"):
        rig.memory.req_to_token_pool.free([row[0], row[0]])


class AllocatorMachine(RuleBasedStateMachine):
    """Sequences grow and end; the model knows which slots each has, by the definition alone."""

    @initialize(page_size=st.sampled_from([1, 2, 4, 16]), need_sort=st.booleans(), pages=st.integers(1, 24))
    def build(self, page_size: int, need_sort: bool, pages: int) -> None:
        self.page_size = page_size
        self.pages = pages
        self.allocator = make_allocator(pages, page_size, need_sort)
        self.sequences: list[list[int]] = []
        self.pending: set[int] = set()
        self.in_group = False

    def owned(self) -> set[int]:
        return {slot // self.page_size for slots in self.sequences for slot in slots}

    def room(self) -> int:
        return self.pages - len(self.owned()) - len(self.pending)

    def pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    @rule(data=st.data(), new=st.lists(st.integers(1, 40), max_size=3), grow=st.integers(0, 20))
    def extend(self, data: st.DataObject, new: list[int], grow: int) -> None:
        some = (
            data.draw(st.lists(st.sampled_from(self.sequences), unique_by=id, max_size=3))
            if self.sequences
            else []
        )
        old = [*some, *([] for _ in new)]
        lens = [len(slots) for slots in old]
        add = [grow] * len(some) + new
        need = sum(self.pages_of(n + a) - self.pages_of(n) for n, a in zip(lens, add, strict=True))
        got = self.allocator.alloc(need * self.page_size)
        assert (got is None) == (need > self.room())
        if got is not None:
            given = got.tolist()
            for slots, count in zip(old, add, strict=True):
                partial = -len(slots) % self.page_size
                slots.extend(range(slots[-1] + 1, slots[-1] + 1 + min(partial, count)) if partial else ())
                whole = self.pages_of(count - min(partial, count)) * self.page_size
                slots.extend(given[: count - min(partial, count)])
                del given[:whole]
            self.sequences += old[len(some) :]

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0, 1000))
    def end(self, index: int) -> None:
        slots = self.sequences.pop(index % len(self.sequences))
        self.allocator.free(np.array(slots, np.int64))
        if self.in_group:
            self.pending |= {slot // self.page_size for slot in slots}

    @rule()
    def group(self) -> None:
        if not self.in_group:
            self.allocator.free_group_begin()
        else:
            pages = self.allocator.free_group_take()
            assert set(pages.tolist()) == self.pending
            self.allocator.free_page_ids(pages)
        self.in_group = not self.in_group
        self.pending = set()

    @rule()
    def merge(self) -> None:
        self.allocator.merge_and_sort_free()
        assert (np.diff(self.allocator.free_pages) > 0).all()

    @invariant()
    def every_page_has_one_owner(self) -> None:
        free = [*self.allocator.free_pages.tolist(), *self.allocator.release_pages.tolist()]
        pending = self.allocator.pending_pages().tolist()
        assert sorted([*free, *pending, *self.owned()]) == list(range(1, self.pages + 1))
        assert self.allocator.available_size() == len(free) * self.page_size

    @invariant()
    def sequences_lie_in_their_own_pages_in_order(self) -> None:
        assert sum(self.pages_of(len(slots)) for slots in self.sequences) == len(self.owned())
        for slots in self.sequences:
            for position, slot in enumerate(slots):
                assert slot % self.page_size == position % self.page_size
                assert position % self.page_size == 0 or slot == slots[position - 1] + 1


def test_allocator_against_the_model() -> None:
    run_state_machine_as_test(AllocatorMachine, settings=settings(max_examples=60, stateful_step_count=30))


@pytest.mark.invariants
def test_allocator_against_the_model_for_long() -> None:
    run_state_machine_as_test(AllocatorMachine, settings=settings(max_examples=100, stateful_step_count=100))
