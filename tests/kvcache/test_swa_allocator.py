"""SWATokenToKVPoolAllocator alone: the table, locks by page id, many rows at once against one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.allocator import make_allocator
from kvcache.group_allocator import Evictable, GroupAllocator
from kvcache.swa_allocator import SWATokenToKVPoolAllocator
from kvcache.tree_node import TreeNode
from kvcache.window_locks import WindowLocks
from tests.kvcache.support import NAMESPACE


class NothingCached:
    """A tree that has nothing to evict. `asked` is how many pages were wanted of it, call by call."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def evict(self, group: str, pages: int) -> int:
        assert group == "window"
        self.asked.append(pages)
        return 0

    def evictable(self, group: str) -> int:
        assert group == "window"
        return 0


def build(
    pages: int = 64, page_size: int = 4, window: int = 8, rows: int = 6, cached: Evictable | None = None
) -> SWATokenToKVPoolAllocator:
    allocator = GroupAllocator("window", make_allocator(pages, page_size), cached or NothingCached())
    return SWATokenToKVPoolAllocator(allocator, WindowLocks(pages, "lru"), window, rows, 400)


def take(swa: SWATokenToKVPoolAllocator, n: int) -> np.ndarray:
    """Pages that play the tree's, on a node for each."""
    pages = swa.allocator.alloc_pages(n)
    assert pages is not None
    for page in pages:
        swa.locks.keep(TreeNode(None, NAMESPACE, b"", page.tobytes(), 1, 0), page[None])
    return pages


def offered(swa: SWATokenToKVPoolAllocator) -> set[int]:
    """The tree's pages whose nodes are on offer; afterwards none is."""
    nodes = iter(lambda: swa.locks.evictor.pop(lambda node: True), None)
    return {int(node.value[0]) for node in nodes}


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@given(window=st.integers(1, 300), page_size=st.sampled_from([1, 2, 4, 16, 64]), length=st.integers(0, 2000))
def test_what_is_needed_is_the_window_of_the_last_page_border_and_a_page_at_most(
    window: int, page_size: int, length: int
) -> None:
    swa = build(1, page_size, window)
    needed, border = swa.needed_from(length), length // page_size * page_size
    assert needed * page_size <= max(0, length - window + 1), "a query at the length sees no less"
    assert needed * page_size <= max(0, border - window + 1), "nor one at the border"
    assert length // page_size + 1 - needed <= -(-window // page_size) + 1


def test_a_match_is_locked_from_the_window_s_first_page_to_the_first_hole() -> None:
    swa = build()
    tree = take(swa, 5)
    tree[3] = 0
    swa.attach(1, 20, tree)
    assert swa.locks.locked_pages == 0, "page 3 is the first that is needed, and missing"
    assert swa.extend(1, 20)
    assert swa.table[1, :6].tolist() == [0, 0, 0, 6, 7, 0], "of its own, the hole and what lies behind it"
    swa.attach(2, 12, tree[:3])
    assert swa.table[2, :4].tolist() == [0, tree[1], tree[2], 0]
    assert np.flatnonzero(swa.locks.counts).tolist() == tree[1:3].tolist()
    assert len(swa.release(2)) == 0
    assert swa.locks.locked_pages == 0


def test_sliding_unlocks_the_tree_s_pages_and_returns_the_row_s_own() -> None:
    swa = build()
    tree = take(swa, 2)
    for row in (1, 2):
        swa.attach(row, 8, tree)
    assert offered(swa) == {*tree.tolist()}, "new pages are on offer, and taken off it here"
    assert swa.extend(1, 24)
    own = swa.private_pages(1)
    assert swa.slide(1, 12).tolist() == []
    assert offered(swa) == set(), "the other row locks it still"
    assert swa.slide(2, 12).tolist() == []
    assert offered(swa) == {tree[0]}
    assert swa.slide(1, 20).tolist() == own[:1].tolist()
    assert swa.held_pages(1) == 3
    assert swa.release(1).tolist() == own[1:].tolist()
    assert swa.held_pages(1) == 0
    with pytest.raises(AssertionError, match="more often"):
        swa.locks.unlock(tree[:1])


def test_the_tree_s_pages_replace_the_row_s_own() -> None:
    swa = build()
    assert swa.extend(1, 12)
    own = swa.private_pages(1)
    assert swa.offered(1, 2).tolist() == own[:2].tolist()
    theirs = np.array([own[0], take(swa, 1)[0]], np.int32)
    assert swa.adopt(1, theirs).tolist() == [own[1]], "the tree had another for it"
    assert swa.table[1, :3].tolist() == [*theirs, own[2]]
    assert swa.private_pages(1).tolist() == [own[2]]
    assert swa.locks.locked_pages == 2
    assert swa.offered(1, 3).tolist() == [0, 0, own[2]]


def test_short_of_pages_the_tree_is_asked_and_else_nothing_is_taken() -> None:
    class OnePage(NothingCached):
        """Gives its page up when asked for the second time."""

        def evict(self, group: str, pages: int) -> int:
            super().evict(group, pages)
            if len(self.asked) > 1:
                swa.allocator.free_page_ids(page)
            return len(self.asked) - 1

    cached = OnePage()
    swa = build(pages=3, cached=cached)
    page = take(swa, 1)
    assert not swa.extend(1, 12)
    assert swa.held_pages(1) == 0
    assert swa.extend(1, 12)
    assert cached.asked == [1, 1]


@given(st.data())
def test_many_rows_at_once_do_what_they_do_one_by_one(data: st.DataObject) -> None:
    page_size, window = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.integers(1, 12))
    many, single = (build(200, page_size, window) for _ in range(2))
    starts = data.draw(st.lists(st.integers(1, 10), min_size=5, max_size=5))
    for swa in (many, single):
        tree = take(swa, 10)
        for row, pages in enumerate(starts, 1):
            swa.attach(row, pages * page_size, tree[:pages])
    rows = np.arange(1, 6)
    lengths = np.array(starts) * page_size
    for _ in range(data.draw(st.integers(1, 20))):
        assert many.extend_rows(rows, lengths + 1)
        assert all(single.extend(row, length + 1) for row, length in zip(rows, lengths, strict=True))
        lengths += 1
        if data.draw(st.booleans()):
            freed = sorted(many.slide_rows(rows, lengths).tolist())
            wanted = [single.slide(row, length) for row, length in zip(rows, lengths, strict=True)]
            assert freed == sorted(np.concatenate(wanted).tolist())
        for name in ("table", "first", "private_from", "end"):
            assert np.array_equal(getattr(many, name), getattr(single, name)), name
        assert np.array_equal(many.locks.counts, single.locks.counts)
        assert many.locks.locked_pages == single.locks.locked_pages


def test_many_rows_take_all_or_nothing() -> None:
    swa = build(pages=3)
    assert swa.extend_rows(ints(1, 2), ints(4, 4))
    assert not swa.extend_rows(ints(1, 2), ints(5, 5))
    assert swa.extend_rows(ints(1, 2), ints(5, 4)), "only one of them needs a page"
    assert [swa.held_pages(row) for row in (1, 2)] == [2, 1]
