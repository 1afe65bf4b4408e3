"""Decode batches padded to the sizes for which a graph is recorded."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from engine.batch import ForwardBatch, SamplingRows, StateSlots, WindowPages

Ints = TypeVar("Ints", bound=np.integer)


def padded_sizes(most: int) -> tuple[int, ...]:
    """Powers of two up to the first that is at least `most`.

    At most half of a step's rows are padding. They are cheap: each attends to one token, and a decode step
    reads all weights however many rows it has. A finer ladder would save little and costs a graph and an
    attention workspace per step of it.
    """
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return tuple(sizes)


def is_decode(batch: ForwardBatch) -> bool:
    """Whether every sequence has one new token and is sampled after it, and none starts without a state."""
    starts_here = batch.state is not None and not batch.state.reads.all()
    return len(batch.sampled) == len(batch.q_lens) == len(batch.input_ids) and not starts_here


def padded(batch: ForwardBatch, size: int) -> ForwardBatch:
    """A decode batch of `size` sequences: this one's, then padding. Only the original ones are sampled.

    A padding sequence has one token, in slot 0 of the scratch page 0; its state is read from and written to
    slot 0.
    """
    more = size - len(batch.q_lens)
    if not more:
        return batch

    def longer(array: npt.NDArray[Ints], fill: int = 0) -> npt.NDArray[Ints]:
        width = ((0, more),) + ((0, 0),) * (array.ndim - 1)
        return np.pad(array, width, constant_values=fill)

    window, state = batch.window, batch.state
    if window is not None:
        window = replace(window, page_table=longer(window.page_table), out_slots=longer(window.out_slots))
    if state is not None:
        state = StateSlots(longer(state.reads), longer(state.writes))
    return replace(
        batch,
        input_ids=longer(batch.input_ids),
        positions=longer(batch.positions),
        out_slots=longer(batch.out_slots),
        rows=longer(batch.rows),
        q_lens=longer(batch.q_lens, 1),
        seq_lens=longer(batch.seq_lens, 1),
        page_table=longer(batch.page_table),
        window=window,
        state=state,
    )


def padding(size: int, windows: bool, states: bool) -> ForwardBatch:
    """A decode batch of nothing but `size` padding sequences, for a model with these groups."""
    longs, ints = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
    table = np.zeros((0, 1), dtype=np.int32)
    nothing = ForwardBatch(
        input_ids=longs,
        positions=longs,
        out_slots=longs,
        rows=ints,
        q_lens=ints,
        seq_lens=ints,
        page_table=table,
        sampled=ints,
        sampling=SamplingRows((), longs),
        window=WindowPages(table, longs) if windows else None,
        state=StateSlots(ints, ints) if states else None,
    )
    return padded(nothing, size)
