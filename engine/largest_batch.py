"""The largest forward that a scheduler may launch, to measure what memory forwards need beside KV."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.batch import ForwardBatch, PooledPrompt, SamplingRows, StateSlots, WindowPages
from engine.sampling_state import SamplingState
from engine.spec import ModelSpec
from wire.request import SamplingParams

_COSTLIEST = SamplingParams(
    temperature=1.0,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    top_logprobs=20,
)


def largest_lens(tokens: int, chunk: int, sequences: int) -> list[int]:
    """New tokens of each sequence: chunks of at most `chunk` that have `tokens` together, as far as there are
    sequences, and one of each of the others."""
    lens: list[int] = []
    for _ in range(sequences):
        lens.append(max(1, min(chunk, tokens - sum(lens))))
    return lens


def pages_of(lens: Sequence[int], page_size: int) -> int:
    """Pages that `largest_batch` uses, from page 1 on, in each group."""
    return sum(-(-n // page_size) for n in lens)


def largest_batch(
    spec: ModelSpec, lens: Sequence[int], page_size: int, context: int | None = None
) -> ForwardBatch:
    """A batch of sequences that are all sampled, with what costs the sampler most memory. The hidden states
    of all tokens are read, so that decoders compute all of each layer.

    They begin here; or they have contexts of `context` tokens, with whole pages before the new ones, so some
    are less than a page shorter. These pages before are all page 1: values do not matter.
    """
    lengths, count = np.array(lens, dtype=np.int32), len(lens)
    before = np.zeros_like(lengths)  # pages
    if context is not None:
        before = np.maximum(0, context - lengths) // page_size
    pages = -(-lengths // page_size)
    logical = np.arange(int((before + pages).max()))
    is_new = (before[:, None] <= logical) & (logical < (before + pages)[:, None])
    table = (logical < before[:, None]).astype(np.int32)
    table[is_new] = np.arange(1, int(pages.sum()) + 1)
    firsts = before.astype(np.int64) * page_size
    positions = np.concatenate(
        [first + np.arange(n, dtype=np.int64) for first, n in zip(firsts, lens, strict=True)]
    )
    owners = np.repeat(np.arange(count), lengths)
    slots = table[owners, positions // page_size].astype(np.int64) * page_size + positions % page_size
    kinds = {group.kind for group in spec.groups}
    states = tuple(SamplingState(_COSTLIEST, np.zeros(n, dtype=np.int32), ()) for n in lens)
    return ForwardBatch(
        input_ids=np.zeros(len(positions), dtype=np.int64),
        positions=positions,
        out_slots=slots,
        rows=np.arange(1, count + 1, dtype=np.int32),
        q_lens=lengths,
        seq_lens=(firsts + lengths).astype(np.int32),
        page_table=table,
        sampled=np.arange(count, dtype=np.int32),
        sampling=SamplingRows(states, np.zeros(count, dtype=np.int64)),
        window=WindowPages(table.copy(), slots.copy()) if "window" in kinds else None,
        state=StateSlots(np.zeros(count, dtype=np.int32), np.arange(1, count + 1, dtype=np.int32))
        if "state" in kinds
        else None,
        pooled=tuple(PooledPrompt(sequence, 0) for sequence in range(count)),
    )
