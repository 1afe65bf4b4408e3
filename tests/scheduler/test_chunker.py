"""Where chunks end."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from scheduler.chunker import chunk_end, first_cut


def _ends(
    total: int, budget: int, page_size: int, last_chunk: int = 0, cuts: tuple[int, ...] = ()
) -> list[int]:
    ends = [0]
    while ends[-1] < total:
        end = first_cut(ends[-1], chunk_end(ends[-1], total, budget, page_size, last_chunk), cuts)
        assert end > ends[-1], "a chunk of a whole page always fits"
        ends.append(end)
    return ends[1:]


@given(
    total=st.integers(1, 300),
    pages=st.integers(1, 5),
    page_size=st.sampled_from([1, 4, 16]),
    extra=st.integers(0, 15),
    last_chunk=st.integers(0, 40),
    cuts=st.lists(st.integers(1, 299), max_size=4),
)
def test_chunks_cover_the_prompt(
    total: int, pages: int, page_size: int, extra: int, last_chunk: int, cuts: list[int]
) -> None:
    budget = pages * page_size + extra
    borders = tuple(cut // page_size * page_size for cut in cuts)
    ends = _ends(total, budget, page_size, last_chunk, borders)
    starts = [0, *ends[:-1]]
    assert ends[-1] == total
    assert all(end - start <= budget for start, end in zip(starts, ends, strict=True))
    assert all(end % page_size == 0 for end in ends[:-1])
    assert {cut for cut in borders if 0 < cut < total} <= set(ends)
    if last_chunk and len(ends) > 1:
        assert ends[-1] - starts[-1] < last_chunk + page_size


def test_nothing_fits_into_less_than_a_page() -> None:
    assert chunk_end(32, 100, 15, 16) == 32
    assert chunk_end(32, 47, 15, 16) == 47  # the rest of a prompt needs no whole page


def test_a_small_prompt_is_not_cut_for_the_sake_of_its_last_chunk() -> None:
    assert _ends(20, 64, 16, last_chunk=16) == [20]  # less than two pages
    assert _ends(40, 64, 16, last_chunk=16) == [16, 40]
    assert _ends(15, 64, 16, last_chunk=4) == [15]
