"""A token that the scheduler does not know yet is filled in from the forward before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from engine.batch import UNKNOWN_TOKEN, ForwardBatch, SamplingRows
from engine.last_tokens import LastTokens
from engine.sampling_state import SamplingState
from wire.request import SamplingParams


def batch_of(*sequences: tuple[int, Sequence[int], bool]) -> ForwardBatch:
    """A forward of (row, input ids, whether it is sampled)."""
    ids = np.concatenate([np.asarray(ids, dtype=np.int64) for _, ids, _ in sequences])
    q_lens = np.asarray([len(ids) for _, ids, _ in sequences], dtype=np.int32)
    sampled = [i for i, (_, _, is_sampled) in enumerate(sequences) if is_sampled]
    nothing = np.zeros(len(ids), dtype=np.int64)
    return ForwardBatch(
        input_ids=ids,
        positions=nothing,
        out_slots=nothing,
        rows=np.asarray([row for row, _, _ in sequences], dtype=np.int32),
        q_lens=q_lens,
        seq_lens=q_lens,
        page_table=np.zeros((len(sequences), 1), dtype=np.int32),
        sampled=np.asarray(sampled, dtype=np.int32),
        sampling=SamplingRows(tuple(new_state() for _ in sampled), np.zeros(len(sampled), dtype=np.int64)),
    )


def new_state() -> SamplingState:
    return SamplingState(SamplingParams(), np.zeros(1, dtype=np.int32), ())


def test_each_unknown_token_is_the_last_of_its_row() -> None:
    last = LastTokens()
    last.record(batch_of((3, [1], True), (5, [2, 2], False), (100, [3], True)), np.array([30, 40]))
    batch = batch_of(
        (100, [UNKNOWN_TOKEN], True), (7, [8, 9, 10], False), (3, [UNKNOWN_TOKEN], True), (4, [11], True)
    )
    assert last.resolve(batch).tolist() == [40, 8, 9, 10, 30, 11]
    assert batch.input_ids.tolist() == [-1, 8, 9, 10, -1, 11]  # it may be resolved again


def test_a_failed_forward_leaves_a_token_for_the_one_behind_it() -> None:
    last = LastTokens()
    batch = batch_of((3, [1], True), (5, [2], False))
    with pytest.raises(RuntimeError, match="failed"), last.placeholders_on_failure(batch):
        raise RuntimeError("failed")
    assert last.resolve(batch_of((3, [UNKNOWN_TOKEN], True)))[0] >= 0
