"""Drives an Engine without a scheduler: a few sequences, shuffled pages, any schedule."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from engine.batch import UNKNOWN_TOKEN, BatchResult, Engine, ForwardBatch, SamplingRow
from engine.config import EngineConfig
from engine.loader import load_model
from engine.runner import ModelRunner
from engine.sampling_state import SamplingState
from kvcache.pool import MHAKVCache
from wire.messages import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=1 << 20)


def open_runner(
    path: Path, page_size: int, num_pages: int, dtype: str = "float32", attention: str = "torch",
    linear: str = "torch", overlap: bool = False,
) -> tuple[ModelRunner, MHAKVCache]:  # fmt: skip
    """A runner of the model in `path` and its pool, filled with garbage first: what nobody wrote is not 0."""
    config = EngineConfig(str(path), dtype=dtype, attention=attention, linear=linear, overlap=overlap)
    loaded = load_model(config)
    pool = MHAKVCache(loaded.spec.groups[0], num_pages, page_size)
    pool.data.normal_(0.0, 3.0, generator=torch.Generator().manual_seed(0))
    return ModelRunner(loaded, {loaded.spec.groups[0].name: pool}, config), pool


@dataclass
class Lane:
    """One sequence: its context, and where it is."""

    row: int
    context: list[int]  # prompt and outputs known so far
    prompt_len: int
    state: SamplingState
    pages: list[int] = field(default_factory=list)
    done: int = 0  # tokens whose KV is written

    @property
    def outputs(self) -> list[int]:
        """Tokens sampled so far."""
        return self.context[self.prompt_len :]


class Driver:
    """Hands out shuffled pages of a pool with `num_pages` and builds batches."""

    def __init__(self, engine: Engine, num_pages: int, page_size: int, seed: int = 0) -> None:
        self.engine = engine
        self.page_size = page_size
        self._free = list(range(1, num_pages + 1))
        random.Random(seed).shuffle(self._free)
        self._rows = 0

    def add(
        self, prompt: Sequence[int], params: SamplingParams = GREEDY, eos: Sequence[int] = (), choice: int = 0
    ) -> Lane:
        """A new sequence, nothing computed yet."""
        self._rows += 1
        state = SamplingState(params, np.asarray(prompt, dtype=np.int32), eos, choice)
        return Lane(self._rows, list(prompt), len(prompt), state)

    def batch(self, work: Sequence[tuple[Lane, int]], unknown: bool = False) -> ForwardBatch:
        """`n` new tokens of each sequence; those that reach the end of their context are sampled.

        With `unknown` the token of a decode row is left to the engine, as an overlapped scheduler does.
        """
        for sequence, n in work:
            while len(sequence.pages) * self.page_size < sequence.done + n:
                sequence.pages.append(self._free.pop())
        lens = [sequence.done + n for sequence, n in work]
        table = np.zeros((len(work), -(-max(lens) // self.page_size) + 1), dtype=np.int32)
        positions, slots, ids, sampled, rows = [], [], [], [], []
        for i, (sequence, n) in enumerate(work):
            new = np.arange(sequence.done, sequence.done + n)
            pages = np.asarray(sequence.pages)
            table[i, : len(pages)] = pages[: table.shape[1]]
            positions.append(new)
            slots.append(pages[new // self.page_size] * self.page_size + new % self.page_size)
            known = sequence.context[sequence.done : sequence.done + n]
            ids.extend([UNKNOWN_TOKEN] if (unknown and sequence.done >= sequence.prompt_len) else known)
            if lens[i] >= len(sequence.context):
                sampled.append(i)
                rows.append(SamplingRow(sequence.state, lens[i] - sequence.prompt_len))
            sequence.done += n
        return ForwardBatch(
            input_ids=np.asarray(ids, dtype=np.int64),
            positions=np.concatenate(positions),
            out_slots=np.concatenate(slots),
            rows=np.asarray([sequence.row for sequence, _ in work], dtype=np.int32),
            q_lens=np.asarray([n for _, n in work], dtype=np.int32),
            seq_lens=np.asarray(lens, dtype=np.int32),
            page_table=table,
            sampled=np.asarray(sampled, dtype=np.int32),
            sampling=rows,
        )

    def step(self, work: Sequence[tuple[Lane, int]]) -> BatchResult:
        """One forward, waited for; sampled tokens join their contexts."""
        batch = self.batch(work)
        result = self.engine.launch(batch).result(60)
        for i, token in zip(batch.sampled, result.tokens.tolist(), strict=True):
            work[i][0].context.append(token)
        return result

    def generate(self, sequences: Sequence[Lane], n: int, chunk: int = 1 << 20, stagger: int = 0) -> None:
        """Until every sequence has `n` outputs, prefilling in chunks.

        Sequence i starts `stagger * i` steps late: with a stagger, chunks and decode rows share forwards.
        """
        step = 0
        while unfinished := [s for s in sequences if len(s.outputs) < n]:
            started = [s for s in unfinished if step >= stagger * sequences.index(s)]
            if started:
                self.step([(s, min(chunk, len(s.context) - s.done)) for s in started])
            step += 1
