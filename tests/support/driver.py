"""Drives an Engine without a scheduler: a few sequences, shuffled pages, any schedule."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.batch import (
    UNKNOWN_TOKEN,
    BatchResult,
    Engine,
    ForwardBatch,
    SamplingRows,
    StateSlots,
    WindowPages,
)
from engine.config import EngineConfig
from engine.loader import LoadedModel, load_model
from engine.runner import ModelRunner
from engine.sampling_state import SamplingState
from kvcache.layout import StateGroupSpec
from kvcache.open_pool import open_pool
from kvcache.pool import MambaPool, MHAKVCache
from wire.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=1 << 20)
STATE_SLOTS = 32


def open_pools(
    path: Path, page_size: int, num_pages: int, dtype: str = "float32", attention: str = "torch",
    linear: str = "torch", overlap: bool = False, device: str = "cpu", weight_dtype: str = "auto",
) -> tuple[ModelRunner, dict[str, Any]]:  # fmt: skip
    """A runner of the model in `path` and its pools by name. What nobody wrote in them is garbage, not 0."""
    config = EngineConfig(
        str(path),
        dtype=dtype,
        attention=attention,
        linear=linear,
        overlap=overlap,
        device=device,
        weight_dtype=weight_dtype,
    )
    loaded = load_model(config)
    pools = pools_of(loaded, page_size, num_pages, device)
    return ModelRunner(loaded, pools, config), pools


def pools_of(loaded: LoadedModel, page_size: int, num_pages: int, device: str = "cpu") -> dict[str, Any]:
    """Pools for each group of a model, by name, full of garbage."""
    pools: dict[str, Any] = {}
    for seed, spec in enumerate(loaded.spec.groups):
        if isinstance(spec, StateGroupSpec):
            pools[spec.name] = MambaPool(spec, STATE_SLOTS, device)
            pools[spec.name].bytes.fill_(255)  # NaN in every dtype
            continue
        pool: Any = open_pool(spec, num_pages, page_size, device)
        pools[spec.name] = pool
        pool.data.normal_(0.0, 3.0, generator=torch.Generator(device).manual_seed(seed))
    return pools


def open_runner(*args: Any, **options: Any) -> tuple[ModelRunner, Any]:
    """The same with the pool of the primary group only."""
    runner, pools = open_pools(*args, **options)
    return runner, pools[runner.spec.groups[0].name]


@dataclass
class Lane:
    """One sequence: its context, and where it is."""

    row: int
    context: list[int]  # prompt and outputs known so far
    prompt_len: int
    state: SamplingState
    pages: list[int] = field(default_factory=list)
    window_pages: list[int] = field(default_factory=list)  # by logical page; 0: fell out of the window
    done: int = 0  # tokens whose KV is written
    state_slot: int = 0  # holds the state after `done` tokens; 0: there is none
    next_slot: int = 0  # where the next forward leaves its state; 0: the driver takes a free one

    @property
    def outputs(self) -> list[int]:
        """Tokens sampled so far."""
        return self.context[self.prompt_len :]

    def add(self, token: int) -> None:
        """Its next output."""
        self.context.append(token)
        self.state.outputs.append(token)


class Driver:
    """Hands out shuffled pages of pools with `num_pages` and builds batches.

    A page that fell out of a lane's window goes back to the window pool before the lane's next forward, and
    its entry in the page table is 0. With `window_pool` it is filled with NaN too, for engines that are not
    launched ahead.
    """

    def __init__(
        self, engine: Engine, num_pages: int, page_size: int, seed: int = 0,
        window_pool: MHAKVCache | None = None,
    ) -> None:  # fmt: skip
        self.engine = engine
        self.page_size = page_size
        self.window_pool = window_pool
        windows = (group.window for group in engine.spec.groups)
        self.window = next((window for window in windows if window is not None), None)
        self._free = list(range(1, num_pages + 1))
        random.Random(seed).shuffle(self._free)
        self._free_window = list(range(1, num_pages + 1))
        random.Random(seed + 1).shuffle(self._free_window)
        self._free_states = list(range(1, STATE_SLOTS + 1))
        random.Random(seed + 2).shuffle(self._free_states)
        self._rows = 0

    def add(
        self, prompt: Sequence[int], params: SamplingParams = GREEDY, eos: Sequence[int] = (), choice: int = 0
    ) -> Lane:
        """A new sequence, nothing computed yet."""
        self._rows += 1
        state = SamplingState(params, np.asarray(prompt, dtype=np.int32), eos, choice, [])
        return Lane(self._rows, list(prompt), len(prompt), state)

    def batch(self, work: Sequence[tuple[Lane, int]], unknown: bool = False) -> ForwardBatch:
        """`n` new tokens of each sequence; those that reach the end of their context are sampled.

        With `unknown` the token of a decode row is left to the engine, as an overlapped scheduler does.
        """
        for sequence, n in work:
            while len(sequence.pages) * self.page_size < sequence.done + n:
                sequence.pages.append(self._free.pop())
        lens = [sequence.done + n for sequence, n in work]
        window = None if self.window is None else self._window_pages(work, self.window)
        state = self._state_slots(work) if any(g.kind == "state" for g in self.engine.spec.groups) else None
        table = np.zeros((len(work), -(-max(lens) // self.page_size) + 1), dtype=np.int32)
        positions, slots, ids, sampled, states = [], [], [], [], []
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
                states.append(sequence.state)
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
            sampling=SamplingRows(
                tuple(states),
                np.asarray([lens[i] - work[i][0].prompt_len for i in sampled], dtype=np.int64),
            ),
            window=window,
            state=state,
        )

    def _state_slots(self, work: Sequence[tuple[Lane, int]]) -> StateSlots:
        for sequence, _ in work:
            if not sequence.next_slot and sequence.row:  # row 0 is padding
                sequence.next_slot = self._free_states.pop()
        reads, writes = zip(*((sequence.state_slot, sequence.next_slot) for sequence, _ in work), strict=True)
        for sequence, _ in work:
            sequence.state_slot = sequence.next_slot
        return StateSlots(np.asarray(reads, dtype=np.int32), np.asarray(writes, dtype=np.int32))

    def _window_pages(self, work: Sequence[tuple[Lane, int]], window: int) -> WindowPages:
        """Slide every lane to its next query and give it pages for its new tokens."""
        gone = [0]
        for sequence, _ in work:
            for logical in range(max(0, sequence.done - window + 1) // self.page_size):
                if sequence.window_pages[logical]:
                    gone.append(sequence.window_pages[logical])
                    sequence.window_pages[logical] = 0
        self._free_window.extend(gone[1:])
        if self.window_pool is not None:
            self.window_pool.data[gone] = torch.nan
        for sequence, n in work:
            while len(sequence.window_pages) * self.page_size < sequence.done + n:
                sequence.window_pages.append(self._free_window.pop())
        table = np.zeros((len(work), max(len(sequence.window_pages) for sequence, _ in work)), dtype=np.int32)
        slots = []
        for i, (sequence, n) in enumerate(work):
            table[i, : len(sequence.window_pages)] = sequence.window_pages
            new = np.arange(sequence.done, sequence.done + n)
            slots.append(table[i, new // self.page_size] * self.page_size + new % self.page_size)
        return WindowPages(table, np.concatenate(slots).astype(np.int64))

    def step(self, work: Sequence[tuple[Lane, int]]) -> BatchResult:
        """One forward, waited for; sampled tokens join their contexts."""
        batch = self.batch(work)
        result = self.engine.launch(batch).result(60)
        for i, token in zip(batch.sampled, result.tokens.tolist(), strict=True):
            work[i][0].add(token)
        return result

    def each_step(self, lanes: Sequence[Lane], n: int, unknown: bool) -> list[list[int]]:
        """n tokens of each lane after its prompt. `unknown`: every step is launched before the result of the
        one before it is taken."""
        pending = [self.engine.launch(self.batch([(lane, lane.prompt_len) for lane in lanes]))]
        steps: list[list[int]] = []
        for _ in range(n - 1):
            if not unknown:
                steps.append(pending[-1].result(60).tokens.tolist())
                for lane, token in zip(lanes, steps[-1], strict=True):
                    lane.add(token)
            pending.append(self.engine.launch(self.batch([(lane, 1) for lane in lanes], unknown=unknown)))
            if unknown:
                steps.append(pending[-2].result(60).tokens.tolist())
                for lane, token in zip(lanes, steps[-1], strict=True):
                    lane.state.outputs.append(token)
        steps.append(pending[-1].result(60).tokens.tolist())
        return [list(tokens) for tokens in zip(*steps, strict=True)]

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
