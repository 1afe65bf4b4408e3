"""The table in C++ against its reference in Python, and both against plain sets."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from router.index.global_index import as_hashes
from router.index.native.build import native
from router.index.page_table import ALL, HELD, Hashes, PageTable, PythonPageTable, Tier, make_page_table

SLOTS = 200
PAGES = [0, 1, -1, 7, 2**63 - 1, -(2**63), *(3**n % 2**61 for n in range(1, 26))]

slots = st.one_of(st.integers(0, 3), st.integers(0, SLOTS - 1))
tiers = st.sampled_from(list(Tier))
masks = st.sampled_from([HELD, ALL, 0b0010, 0b0100, 0b1000, 0])
walks = st.one_of(
    st.integers(0, len(PAGES)).map(lambda n: PAGES[:n]),
    st.lists(st.sampled_from(PAGES), max_size=12),
)


def find(table: PageTable, walk: Hashes, columns: int = SLOTS) -> npt.NDArray[np.int32]:
    found = np.full((4, columns), -7, np.int32)
    table.find(walk, found)
    return found


def expected_rows(truth: dict[tuple[int, int], set[Tier]], walk: list[int]) -> npt.NDArray[np.int32]:
    """`find` in other words, from the tiers of each (slot, page)."""
    found = np.zeros((4, SLOTS), np.int32)
    for slot in {slot for slot, _ in truth}:
        for page in walk:
            if not truth.get((slot, page)):
                break
            found[Tier.GPU, slot] += 1
            best = min(truth[slot, page])
            if best != Tier.GPU:
                found[best, slot] += 1
    return found


class TablesAgree(RuleBasedStateMachine):
    """Every operation is done to both tables and to a dict of (slot, page) -> tiers."""

    @initialize()
    def start(self) -> None:
        self.tables: list[PageTable] = [make_page_table(), PythonPageTable()]
        self.truth: dict[tuple[int, int], set[Tier]] = {}
        self.private: set[tuple[int, int]] = set()  # until the last tier is gone

    @rule(slot=slots, tier=tiers, walk=walks, is_private=st.booleans())
    def store(self, slot: int, tier: Tier, walk: list[int], is_private: bool) -> None:
        for table in self.tables:
            table.store(slot, tier, as_hashes(walk), is_private)
        for page in walk:
            held = self.truth.setdefault((slot, page), set())
            if not held:
                self.private.discard((slot, page))
            held.add(tier)
            if is_private:
                self.private.add((slot, page))

    @rule(slot=slots, tier=tiers, walk=walks)
    def remove(self, slot: int, tier: Tier, walk: list[int]) -> None:
        for table in self.tables:
            table.remove(slot, tier, as_hashes(walk))
        for page in walk:
            self.truth.get((slot, page), set()).discard(tier)

    @rule(slot=slots, mask=masks)
    def clear(self, slot: int, mask: int) -> None:
        for table in self.tables:
            table.clear(slot, mask)
        for (holder, _), held in self.truth.items():
            if holder == slot:
                held -= {tier for tier in Tier if mask >> tier & 1}

    @rule(slot=slots, is_private=st.booleans())
    def clear_told(self, slot: int, is_private: bool) -> None:
        for table in self.tables:
            table.clear_told(slot, is_private)
        for place, held in self.truth.items():
            if place[0] == slot and (place in self.private) == is_private:
                held &= {Tier.EXPECTED}

    @rule(walk=walks)
    def match(self, walk: list[int]) -> None:
        wanted = expected_rows(self.truth, walk)
        for table in self.tables:
            assert np.array_equal(find(table, as_hashes(walk)), wanted)

    @rule(slot=slots, mask=masks)
    def what_one_holds(self, slot: int, mask: int) -> None:
        asked = {tier for tier in Tier if mask >> tier & 1}
        wanted = {page for (who, page), held in self.truth.items() if who == slot and held & asked}
        for table in self.tables:
            assert sorted(table.held(slot, mask)) == sorted(wanted)

    @invariant()
    def as_many_pages(self) -> None:
        if hasattr(self, "tables"):
            wanted = len({page for (_, page), held in self.truth.items() if held})
            assert [len(table) for table in self.tables] == [wanted, wanted]


TablesAgree.TestCase.settings = settings(max_examples=50, stateful_step_count=30)
TestTablesAgree = TablesAgree.TestCase


@pytest.mark.invariants
def test_tables_agree_for_long() -> None:
    long = settings(max_examples=600, stateful_step_count=100)
    run_state_machine_as_test(TablesAgree, settings=long)


def test_the_table_in_use_is_the_compiled_one() -> None:
    assert type(make_page_table()) is not PythonPageTable


def test_without_a_compiler_the_reference_takes_over_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    native.cache_clear()
    try:
        assert isinstance(make_page_table(), PythonPageTable)
        assert isinstance(make_page_table(), PythonPageTable)
    finally:
        native.cache_clear()
    (line,) = caplog.messages
    assert "no C++ compiler" in line


def test_it_grows_and_shrinks() -> None:
    table = make_page_table()
    pages = np.arange(200_000, dtype=np.int64)
    for part in np.split(pages, 100):
        table.store(1, Tier.GPU, part)
    full = table.nbytes()
    assert len(table) == 200_000
    assert full < 20 * len(table)
    for part in np.split(pages[:199_000], 100):
        table.remove(1, Tier.GPU, part)
    for _ in range(1000):  # a little work each time
        table.store(1, Tier.CPU, pages[-1:])
    assert len(table) == 1000
    assert table.nbytes() < full / 10
    assert find(table, pages[199_000:], 2)[Tier.GPU].tolist() == [0, 1000]


def test_many_holders_cost_no_more_than_one() -> None:
    table = make_page_table()
    pages = np.arange(20_000, dtype=np.int64)
    table.store(0, Tier.GPU, pages)
    alone = table.nbytes()
    for slot in range(1, 500):
        table.store(slot, Tier.GPU, pages)
    assert table.nbytes() < alone + 64 * 500
    assert find(table, pages, 500)[Tier.GPU].tolist() == [20_000] * 500


def test_sets_of_holders_are_given_back() -> None:
    """Every page has its own holders, again and again: memory does not grow with the history."""
    table, random = make_page_table(), np.random.default_rng(1)
    sizes = []
    for _ in range(20):
        for page in range(300):
            for slot in random.choice(SLOTS, 5, replace=False).tolist():
                table.store(slot, Tier.GPU, as_hashes([page]))
        sizes.append(table.nbytes())
        for slot in range(SLOTS):
            table.clear(slot, ALL)
        assert len(table) == 0
    assert sizes[-1] < 1.5 * sizes[0]


def test_slots_beyond_the_rows_are_left_out() -> None:
    table = make_page_table()
    for slot in (0, 5):
        table.store(slot, Tier.GPU, as_hashes([1, 2]))
    assert find(table, as_hashes([1, 2]), 3)[Tier.GPU].tolist() == [2, 0, 0]


def test_wrong_arguments_are_refused() -> None:
    table = make_page_table()
    good = as_hashes([1])
    for slot, tier, hashes in (
        (-1, 0, good),
        (2**27, 0, good),
        (0, 4, good),
        (0, -1, good),
        (0, 0, good.astype(np.int32)),
        (0, 0, good.reshape(1, 1)),
    ):
        with pytest.raises(ValueError):
            table.store(slot, tier, hashes)
    with pytest.raises(ValueError):
        table.clear(0, 16)
    for shape in ((3, 2), (4,)):
        with pytest.raises(ValueError):
            table.find(good, np.zeros(shape, np.int32))
    with pytest.raises(ValueError):
        table.find(good, np.zeros((4, 2), np.int64))
    with pytest.raises((ValueError, BufferError)):
        table.store(0, 0, np.arange(10, dtype=np.int64)[::2])
    with pytest.raises(TypeError):
        table.store(0, 0)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        table.store("a", 0, good)  # type: ignore[arg-type]
    assert len(table) == 0


def test_what_is_found_meanwhile_is_always_a_state_that_was() -> None:
    """One thread stores and removes a whole walk; a match in another sees all of it or nothing."""
    table, walk = make_page_table(), np.arange(512, dtype=np.int64)
    table.store(1, Tier.CPU, walk)
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            table.store(0, Tier.GPU, walk)
            table.store(1, Tier.GPU, walk)
            table.clear(0, ALL)
            table.remove(1, Tier.GPU, walk)

    thread = threading.Thread(target=churn)
    thread.start()
    seen = set()
    for _ in range(3000):
        found = find(table, walk, 2)
        seen.add((*found[Tier.GPU].tolist(), *found[Tier.CPU].tolist()))
    stop.set()
    thread.join()
    assert seen <= {(0, 512, 0, 512), (512, 512, 0, 512), (512, 512, 0, 0), (0, 512, 0, 0)}
