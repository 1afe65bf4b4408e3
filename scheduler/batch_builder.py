"""From the decode batch and the step's prefill chunks to one ForwardBatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from engine.batch import ForwardBatch, PooledPrompt, SamplingRows, ScoredPrompt, StateSlots, WindowPages
from scheduler.batch_states import BatchStates
from scheduler.chunker import Chunk
from scheduler.running import RunningBatch
from wire.request import Pooling


def build_batch(
    running: RunningBatch,
    chunks: Sequence[Chunk],
    req_to_token: npt.NDArray[np.int32],
    window_table: npt.NDArray[np.int32] | None = None,
) -> ForwardBatch:
    """One sequence per decoding request, in the order of the decode batch, then one per chunk.

    Sampled are the decoding requests, and the last chunks of prompts whose next token is not known yet. The
    batch shares no memory with `running` and the tables, which change while the forward runs.
    `window_table` is the window group's `[row, logical page]`, for a model that has one.
    """
    if not chunks:
        batch = _decode_part(running)
    else:
        batch = _prefill_part(chunks, req_to_token, running.page_size)
        if len(running):
            batch = _joined(_decode_part(running), batch)
    if window_table is None and running.states is None:
        return batch
    window = None if window_table is None else _window(batch, window_table, running.page_size)
    state = None if running.states is None else _states(running.states, len(running), chunks)
    return replace(batch, window=window, state=state)


def _decode_part(running: RunningBatch) -> ForwardBatch:
    """One token of every decoding request."""
    n, page_size = len(running), running.page_size
    lens = running.lens[:n]
    widest = int(lens.max()) // page_size + 1
    pages = running.page_table[running.indices(), lens // page_size].astype(np.int64)
    return ForwardBatch(
        input_ids=running.next_ids[:n].copy(),
        positions=lens.copy(),
        out_slots=pages * page_size + lens % page_size,
        rows=running.rows[:n].copy(),
        q_lens=np.ones(n, dtype=np.int32),
        seq_lens=(lens + 1).astype(np.int32),
        page_table=running.page_table[:n, :widest].copy(),
        sampled=np.arange(n, dtype=np.int32),
        # after this step the context is length + 1 tokens long: the output position that comes next
        sampling=SamplingRows(tuple(running.sampling), lens + 1 - running.prompt_lens[:n]),
    )


def _prefill_part(
    chunks: Sequence[Chunk], req_to_token: npt.NDArray[np.int32], page_size: int
) -> ForwardBatch:
    """The tokens of every chunk."""
    contexts = [req_to_token[chunk.req.req_pool_idx, : chunk.end] for chunk in chunks]
    page_table = np.zeros((len(chunks), -(-max(map(len, contexts)) // page_size)), dtype=np.int32)
    for i, slots in enumerate(contexts):
        pages = slots[::page_size] // page_size
        page_table[i, : len(pages)] = pages
    sampled = [i for i, chunk in enumerate(chunks) if chunk.samples]
    scored = tuple(_scored(i, chunk) for i, chunk in enumerate(chunks) if chunk.req.scores_prompt)
    return ForwardBatch(
        input_ids=_packed([chunk.req.fill_ids[chunk.start : chunk.end] for chunk in chunks]),
        positions=_packed([np.arange(chunk.start, chunk.end) for chunk in chunks]),
        out_slots=_packed([slots[chunk.start :] for slots, chunk in zip(contexts, chunks, strict=True)]),
        rows=np.array([chunk.req.req_pool_idx for chunk in chunks], dtype=np.int32),
        q_lens=np.array([chunk.end - chunk.start for chunk in chunks], dtype=np.int32),
        seq_lens=np.array([chunk.end for chunk in chunks], dtype=np.int32),
        page_table=page_table,
        sampled=np.array(sampled, dtype=np.int32),
        sampling=SamplingRows(
            tuple(chunks[i].req.sampling for i in sampled),
            np.array([chunks[i].end - chunks[i].req.prompt_len for i in sampled], dtype=np.int64),
        ),
        scored=scored,
        pooled=tuple(_pooled(i, chunk) for i, chunk in enumerate(chunks) if chunk.is_pooled),
    )


def _scored(sequence: int, chunk: Chunk) -> ScoredPrompt:
    """Each token of a chunk is followed by one of the prompt, but the prompt's last."""
    req = chunk.req
    targets = req.origin_input_ids[chunk.start + 1 : chunk.end + 1].astype(np.int64)
    return ScoredPrompt(sequence, targets, req.request.sampling.prompt_logprobs or 0)


def _pooled(sequence: int, chunk: Chunk) -> PooledPrompt:
    """All tokens of the chunk count, or the prompt's last one alone."""
    every = chunk.req.pooling is Pooling.MEAN
    return PooledPrompt(sequence, 0 if every else chunk.end - chunk.start - 1)


def _packed(parts: list[npt.NDArray[np.integer]]) -> npt.NDArray[np.int64]:
    return np.concatenate(parts).astype(np.int64, copy=False)


def _joined(first: ForwardBatch, second: ForwardBatch) -> ForwardBatch:
    """The sequences of both batches, in order."""
    n = len(first.rows)
    width = max(first.page_table.shape[1], second.page_table.shape[1])
    page_table = np.zeros((n + len(second.rows), width), dtype=np.int32)
    page_table[:n, : first.page_table.shape[1]] = first.page_table
    page_table[n:, : second.page_table.shape[1]] = second.page_table
    return ForwardBatch(
        input_ids=np.concatenate([first.input_ids, second.input_ids]),
        positions=np.concatenate([first.positions, second.positions]),
        out_slots=np.concatenate([first.out_slots, second.out_slots]),
        rows=np.concatenate([first.rows, second.rows]),
        q_lens=np.concatenate([first.q_lens, second.q_lens]),
        seq_lens=np.concatenate([first.seq_lens, second.seq_lens]),
        page_table=page_table,
        sampled=np.concatenate([first.sampled, second.sampled + np.int32(n)]),
        sampling=SamplingRows(
            first.sampling.states + second.sampling.states,
            np.concatenate([first.sampling.positions, second.sampling.positions]),
        ),
        scored=tuple(replace(one, sequence=one.sequence + n) for one in second.scored),
        pooled=tuple(replace(one, sequence=one.sequence + n) for one in second.pooled),
    )


def _window(batch: ForwardBatch, table: npt.NDArray[np.int32], page_size: int) -> WindowPages:
    pages = table[batch.rows, : batch.page_table.shape[1]]
    owner = np.repeat(np.arange(len(batch.rows)), batch.q_lens)
    logical, offsets = np.divmod(batch.positions, page_size)
    return WindowPages(pages, pages[owner, logical].astype(np.int64) * page_size + offsets)


def _states(states: BatchStates, decoding: int, chunks: Sequence[Chunk]) -> StateSlots:
    """The slots of the first `decoding` sequences, which decode, and of the chunks."""
    if not chunks:
        return StateSlots(states.reads[:decoding].copy(), states.writes[:decoding].copy())
    reads = [chunk.state_read for chunk in chunks]
    writes = [chunk.state_write for chunk in chunks]
    return StateSlots(
        np.concatenate([states.reads[:decoding], np.array(reads, np.int32)]),
        np.concatenate([states.writes[:decoding], np.array(writes, np.int32)]),
    )
