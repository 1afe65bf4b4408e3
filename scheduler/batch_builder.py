"""From decode lanes and prefill chunks to one ForwardBatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from engine.batch import ForwardBatch, SamplingRow, StateSlots, WindowPages
from scheduler.batch_states import BatchStates
from scheduler.chunker import Chunk
from scheduler.running import RunningBatch


def _sampling_rows(running: RunningBatch) -> list[SamplingRow]:
    # a context of `length` tokens after this step: output position length - prompt_len is sampled
    lengths = running.lens[: len(running)].tolist()
    return [
        SamplingRow(req.sampling, length + 1 - req.prompt_len)
        for req, length in zip(running.reqs, lengths, strict=True)
    ]


def _decode_batch(running: RunningBatch) -> ForwardBatch:
    n, page_size = len(running), running.page_size
    lens = running.lens[:n]
    widest = int(lens.max()) // page_size + 1
    pages = running.page_table[running.lanes(), lens // page_size].astype(np.int64)
    return ForwardBatch(
        input_ids=running.next_ids[:n].copy(),
        positions=lens.copy(),
        out_slots=pages * page_size + lens % page_size,
        rows=running.rows[:n].copy(),
        q_lens=np.ones(n, dtype=np.int32),
        seq_lens=(lens + 1).astype(np.int32),
        page_table=running.page_table[:n, :widest].copy(),
        sampled=np.arange(n, dtype=np.int32),
        sampling=_sampling_rows(running),
    )


def _packed(parts: list[npt.NDArray[np.integer]]) -> npt.NDArray[np.int64]:
    return np.concatenate(parts).astype(np.int64, copy=False)


def build_batch(
    running: RunningBatch,
    chunks: Sequence[Chunk],
    req_to_token: npt.NDArray[np.int32],
    window_table: npt.NDArray[np.int32] | None = None,
) -> ForwardBatch:
    """One sequence per decode lane, in lane order, then one per chunk.

    Sampled are the lanes and those last chunks whose next token is not known yet. The batch shares no
    memory with `running` and the tables, which move on while the forward runs. `window_table` is the window
    group's `[row, logical page]`, where there is one.
    """
    batch = _build(running, chunks, req_to_token)
    if window_table is None and running.states is None:
        return batch
    window = None if window_table is None else _window(batch, window_table, running.page_size)
    state = None if running.states is None else _states(running.states, len(running), chunks)
    return replace(batch, window=window, state=state)


def _window(batch: ForwardBatch, table: npt.NDArray[np.int32], page_size: int) -> WindowPages:
    pages = table[batch.rows, : batch.page_table.shape[1]]
    owner = np.repeat(np.arange(len(batch.rows)), batch.q_lens)
    logical, offsets = np.divmod(batch.positions, page_size)
    return WindowPages(pages, pages[owner, logical].astype(np.int64) * page_size + offsets)


def _states(states: BatchStates, lanes: int, chunks: Sequence[Chunk]) -> StateSlots:
    if not chunks:
        return StateSlots(states.reads[:lanes].copy(), states.writes[:lanes].copy())
    reads = [chunk.state_read for chunk in chunks]
    writes = [chunk.state_write for chunk in chunks]
    return StateSlots(
        np.concatenate([states.reads[:lanes], np.array(reads, np.int32)]),
        np.concatenate([states.writes[:lanes], np.array(writes, np.int32)]),
    )


def _build(
    running: RunningBatch, chunks: Sequence[Chunk], req_to_token: npt.NDArray[np.int32]
) -> ForwardBatch:
    if not chunks:
        return _decode_batch(running)
    page_size = running.page_size
    slots = [req_to_token[chunk.req.req_pool_idx, : chunk.end] for chunk in chunks]
    decode = _decode_batch(running) if len(running) else None
    lanes = len(running)
    ends = [chunk.end for chunk in chunks]
    sampled = [i for i, chunk in enumerate(chunks) if chunk.is_last and not chunk.req.is_kv_only]

    longest = -(-max(ends) // page_size)
    if decode is not None:
        longest = max(longest, decode.page_table.shape[1])
    page_table = np.zeros((lanes + len(chunks), longest), dtype=np.int32)
    for i, row in enumerate(slots):
        pages = row[::page_size] // page_size
        page_table[lanes + i, : len(pages)] = pages

    input_ids = [chunk.req.fill_ids[chunk.start : chunk.end] for chunk in chunks]
    positions = [np.arange(chunk.start, chunk.end) for chunk in chunks]
    out_slots = [row[chunk.start :] for row, chunk in zip(slots, chunks, strict=True)]
    rows = np.array([chunk.req.req_pool_idx for chunk in chunks], dtype=np.int32)
    q_lens = np.array([chunk.end - chunk.start for chunk in chunks], dtype=np.int32)
    seq_lens = np.array(ends, dtype=np.int32)
    chosen = np.array(sampled, dtype=np.int32) + np.int32(lanes)
    sampling = [
        SamplingRow(chunks[i].req.sampling, chunks[i].end - chunks[i].req.prompt_len) for i in sampled
    ]
    if decode is None:
        return ForwardBatch(
            _packed([*input_ids]), _packed([*positions]), _packed([*out_slots]),
            rows, q_lens, seq_lens, page_table, chosen, sampling,
        )  # fmt: skip
    page_table[:lanes, : decode.page_table.shape[1]] = decode.page_table
    return ForwardBatch(
        input_ids=_packed([decode.input_ids, *input_ids]),
        positions=_packed([decode.positions, *positions]),
        out_slots=_packed([decode.out_slots, *out_slots]),
        rows=np.concatenate([decode.rows, rows]),
        q_lens=np.concatenate([decode.q_lens, q_lens]),
        seq_lens=np.concatenate([decode.seq_lens, seq_lens]),
        page_table=page_table,
        sampled=np.concatenate([decode.sampled, chosen]),
        sampling=[*decode.sampling, *sampling],
    )
