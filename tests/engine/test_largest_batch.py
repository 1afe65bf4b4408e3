"""The largest batch is one that a scheduler could build: every token has a slot of its own."""

from __future__ import annotations

import pytest

from engine.fake import fake_spec
from engine.largest_batch import largest_batch, largest_lens, pages_of


@pytest.mark.parametrize(
    ("tokens", "chunk", "sequences", "lens"),
    [
        (70, 40, 4, [40, 30, 1, 1]),
        (64, 64, 3, [64, 1, 1]),
        (100, 30, 2, [30, 30]),
        (1, 1, 1, [1]),
    ],
)
def test_chunks_first_then_decode_rows(tokens: int, chunk: int, sequences: int, lens: list[int]) -> None:
    assert largest_lens(tokens, chunk, sequences) == lens


@pytest.mark.parametrize(
    ("context", "seq_lens"),
    [(None, [40, 30, 1, 16]), (200, [200, 190, 193, 192]), (64, [56, 62, 49, 64]), (8, [40, 30, 1, 16])],
)
def test_every_token_has_a_slot_of_its_own(context: int | None, seq_lens: list[int]) -> None:
    lens = [40, 30, 1, 16]
    batch = largest_batch(fake_spec(1024, groups=("window", "state")), lens, 16, context)
    assert batch.seq_lens.tolist() == seq_lens
    assert batch.read_lens().tolist() == lens
    assert len(set(batch.out_slots.tolist())) == sum(lens) == len(batch.input_ids)
    assert set((batch.out_slots // 16).tolist()) == set(range(1, pages_of(lens, 16) + 1))
    for i, (start, end) in enumerate(zip(batch.starts(), batch.starts()[1:], strict=False)):
        slots, positions = batch.out_slots[start:end], batch.positions[start:end]
        assert positions.tolist() == list(range(seq_lens[i] - lens[i], seq_lens[i]))
        assert (batch.page_table[i, : positions[0] // 16] == 1).all()
        assert (slots // 16 == batch.page_table[i, positions // 16]).all()
        assert (slots % 16 == positions % 16).all()
    assert batch.window is not None
    assert batch.state is not None
    assert len(set(batch.state.writes.tolist())) == len(lens)
