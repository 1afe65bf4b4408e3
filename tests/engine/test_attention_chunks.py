"""Chunked attention: which slots each new token sees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from engine.attention_chunks import AttentionChunks
from engine.batch import ForwardBatch, SamplingRows

SEQUENCES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=5)


def batch_of(sequences: list[tuple[int, int]], page_size: int) -> ForwardBatch:
    """Of (tokens before, new tokens) each. All but the first are sampled."""
    q_lens = np.array([new for _, new in sequences], np.int32)
    seq_lens = np.array([sum(each) for each in sequences], np.int32)
    width = -(-int(seq_lens.max()) // page_size)
    pages = np.arange(len(sequences) * width, dtype=np.int32).reshape(-1, width) + 1
    positions = np.concatenate([np.arange(before, before + new) for before, new in sequences])
    return ForwardBatch(
        input_ids=np.zeros(len(positions), np.int64),
        positions=positions,
        out_slots=np.arange(len(positions)),
        rows=np.arange(len(sequences), dtype=np.int32) + 7,
        q_lens=q_lens,
        seq_lens=seq_lens,
        page_table=pages,
        sampled=np.arange(1, len(sequences), dtype=np.int32),
        sampling=SamplingRows((), np.zeros(0, np.int64)),
    )


def seen(batch: ForwardBatch, page_size: int) -> list[list[int]]:
    """The slots that each new token of the pack sees, in order."""
    rows = []
    for table, length, new in zip(batch.page_table, batch.seq_lens, batch.q_lens, strict=True):
        slots = (table[:, None] * page_size + np.arange(page_size)).ravel()
        rows += [slots[:end].tolist() for end in range(length - new + 1, length + 1)]
    return rows


@given(SEQUENCES, st.sampled_from([1, 4, 8]))
def test_a_token_sees_its_chunk_up_to_itself(sequences: list[tuple[int, int]], page_size: int) -> None:
    chunk, batch = 8, batch_of(sequences, page_size)
    cut = AttentionChunks(chunk, page_size).of(batch)
    expected = [
        slots[position - position % chunk :]
        for slots, position in zip(seen(batch, page_size), batch.positions, strict=True)
    ]
    assert seen(cut, page_size) == expected
    assert cut.seq_lens.max() <= chunk
    assert [cut.rows[i] for i in cut.sampled] == [batch.rows[i] for i in batch.sampled]
    assert cut.sampled_places().tolist() == batch.sampled_places().tolist()
    assert (cut.out_slots == batch.out_slots).all()


def test_a_batch_within_first_chunks_stays_as_it_is() -> None:
    batch = batch_of([(3, 5), (7, 1)], 4)
    assert AttentionChunks(8, 4).of(batch) is batch


def test_a_decode_row_stays_one_sequence() -> None:
    cut = AttentionChunks(8, 4).of(batch_of([(16, 1), (15, 1), (3, 1)], 4))
    assert cut.q_lens.tolist() == [1, 1, 1]
    assert cut.seq_lens.tolist() == [1, 8, 4]


@pytest.mark.parametrize(("chunk", "page_size"), [(8, 16), (48, 32)])
def test_pages_that_hold_tokens_of_two_chunks_are_refused(chunk: int, page_size: int) -> None:
    named = f"pages of {page_size} tokens do not divide attention_chunk_size {chunk}"
    with pytest.raises(ConfigError, match=named):
        AttentionChunks(chunk, page_size)
