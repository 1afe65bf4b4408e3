from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.index_load import Form, Load, Shape
from router.index.global_index import GlobalIndex, as_hashes
from router.index.page_table import PageTable, PythonPageTable, make_page_table
from wire.events import AllBlocksCleared, BlockRemoved, BlockStored, encode_batch

tables = pytest.mark.parametrize("table", [make_page_table, PythonPageTable])


def find(index: GlobalIndex, walk: list[int]) -> dict[str, int]:
    """Pages that each worker holds; workers with none are absent."""
    pages = index.find(as_hashes(walk)).pages
    return {name: int(count) for name, count in zip(index.names(), pages, strict=True) if name and count}


def test_a_match_is_the_number_of_leading_pages() -> None:
    index = GlobalIndex()
    for name, pages in {"a": [1, 2, 3], "b": [1, 2], "c": [2, 3]}.items():
        index.join(name)
        index.store(name, pages, "GPU")
    index.join("d")
    assert find(index, [1, 2, 3, 4]) == {"a": 3, "b": 2}
    assert find(index, [1, 2]) == {"a": 2, "b": 2}
    assert find(index, [9]) == {}
    assert find(index, []) == {}


def test_a_page_in_any_tier_counts_until_it_has_left_all() -> None:
    index = GlobalIndex()
    index.join("a")
    index.store("a", [1], "GPU")
    index.store("a", [1], "CPU_PINNED")
    index.remove("a", [1], "gpu")
    assert find(index, [1]) == {"a": 1}
    index.remove("a", [1], "CPU")
    assert find(index, [1]) == {}
    assert len(index) == 0
    with pytest.raises(ValueError, match="medium"):
        index.store("a", [1], "TAPE")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["store", "remove", "clear", "drop"]), st.sampled_from("abc"), st.integers(0, 5)
        ),
        max_size=60,
    )
)
def test_it_equals_a_set_per_worker(operations: list[tuple[str, str, int]]) -> None:
    index, truth = GlobalIndex(), {name: set[int]() for name in "abc"}
    for name in truth:
        index.join(name)
    for what, name, page in operations:
        if what == "store":
            index.store(name, [page], None)
            truth[name].add(page)
        elif what == "remove":
            index.remove(name, [page], None)
            truth[name].discard(page)
        else:
            if what == "drop":
                index.drop(name)
                index.join(name)
            else:
                index.clear(name)
            truth[name].clear()
        assert {worker: index.held(worker) for worker in truth} == truth
    walk = [0, 1, 2, 3]
    expected = {}
    for name, pages in truth.items():
        depth = next((i for i, page in enumerate(walk) if page not in pages), len(walk))
        if depth:
            expected[name] = depth
    assert find(index, walk) == expected


def stored(*hashes: int, medium: str | None = "GPU") -> BlockStored:
    return BlockStored(list(hashes), None, [0] * len(hashes), 1, None, medium, None)


@tables
def test_batches_are_applied_event_by_event(table: Callable[[], PageTable]) -> None:
    index = GlobalIndex(table())
    index.join("a")
    assert index.apply("a", encode_batch(0.0, [stored(1, 2, 3), BlockRemoved([2], None)])) == []
    assert index.held("a") == {1, 3}
    assert index.apply("a", encode_batch(0.0, [AllBlocksCleared(), stored(7, -7, medium="disk")])) == []
    assert index.held("a") == {7, -7}
    assert index.find(as_hashes([7, -7])).storage.tolist() == [2]


@tables
def test_one_bad_event_costs_nothing_else(table: Callable[[], PageTable]) -> None:
    index = GlobalIndex(table())
    index.join("a")
    unread = index.apply("a", encode_batch(0.0, [stored(1), stored(2, medium="TAPE"), stored(3)]))
    assert ["TAPE" in one.reason for one in unread] == [True]
    assert index.held("a") == {1, 3}


@tables
def test_a_slot_is_given_again_only_without_its_worker(table: Callable[[], PageTable]) -> None:
    index = GlobalIndex(table())
    assert [index.join(name) for name in "abcb"] == [0, 1, 2, 1]
    index.store("b", [1], None)
    index.expect(1, as_hashes([2]))
    index.drop("b")
    assert (index.names(), len(index)) == (["a", None, "c"], 0)
    assert index.join("d") == 1
    assert index.held("d") == set()
    assert index.slots == 3


@tables
def test_what_is_expected_counts_until_it_is_taken_back(table: Callable[[], PageTable]) -> None:
    index = GlobalIndex(table())
    index.join("a")
    walk = as_hashes([1, 2, 3])
    index.store("a", [1], "GPU")
    index.expect(0, walk)
    assert [int(row[0]) for row in index.find(walk).found] == [3, 0, 0, 2]
    assert index.held("a") == {1}
    index.store("a", [2], "CPU")
    index.unexpect(0, walk)
    assert [int(row[0]) for row in index.find(walk).found] == [2, 1, 0, 0]
    index.expect(0, walk)
    index.clear("a")  # what is on its way may still come
    assert [int(row[0]) for row in index.find(walk).found] == [3, 0, 0, 3]
    index.reset("a")  # another process: it will not
    assert len(index) == 0


@pytest.mark.parametrize("form", [Form.NODE, Form.PAGE])
def test_the_load_of_the_bench_is_what_it_says(form: Form) -> None:
    load = Load(Shape(workers=3, sequences=6, prefixes=2, held=4, pages=4, shared=2))
    index = GlobalIndex()
    told = 0
    for worker, sequence, start in load.insertions():
        index.join(f"w{worker}")
        assert index.apply(f"w{worker}", load.payload(sequence, start, form)) == []
        told += load.shape.pages - start
    assert (len(index), load.blocks()) == (load.different_pages(), told)
    for worker, sequences in enumerate(load.held):
        assert index.held(f"w{worker}") == set(load.hashes[sequences].ravel().tolist())
        assert index.find(load.hashes[sequences[0]]).pages[worker] == 4
    index.apply("w0", load.removal(int(load.held[0, 0])))
    assert index.find(load.hashes[load.held[0, 0]]).pages[0] == 2


@tables
def test_what_has_come_and_left_the_device_is_not_expected_any_more(table: Callable[[], PageTable]) -> None:
    index = GlobalIndex(table())
    index.join("a")
    walk = as_hashes([1, 2, 3])
    index.expect(0, walk)
    index.apply("a", encode_batch(0.0, [stored(1), stored(2), stored(3)]))
    index.apply("a", encode_batch(0.0, [BlockRemoved(block_hashes=[3], medium="CPU")]))
    index.apply("a", encode_batch(0.0, [BlockRemoved(block_hashes=[3], medium="GPU")]))
    assert [int(row[0]) for row in index.find(walk).found] == [2, 0, 0, 0]
    index.apply("a", encode_batch(0.0, [BlockRemoved(block_hashes=[2], medium="CPU"), AllBlocksCleared()]))
    assert [int(row[0]) for row in index.find(walk).found] == [2, 0, 0, 2], "none of these says that it came"
