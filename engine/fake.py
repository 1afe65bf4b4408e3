"""A deterministic engine without a model, honest about memory.

Every token's id and position are written to its KV slot, and the next token is a hash of the whole context
as READ BACK from the pages in page-table order. So a page that was lost, swapped, stale or shared by mistake
changes the output, just as it would with a model, at no cost; `fake_generate` is the pure oracle.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import BatchResult, ForwardBatch, SamplingRow
from engine.last_tokens import LastTokens
from engine.launch import Launched, LaunchQueue
from engine.spec import ModelSpec
from kvcache.layout import KVGroupSpec
from kvcache.pool import MHAKVCache
from wire.messages import TokenLogprobs

_MULTIPLIERS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], dtype=np.uint64)


@dataclass(frozen=True)
class FakeTiming:
    """How long a forward pretends to compute, in seconds."""

    per_step_s: float = 0.0
    per_prefill_token_s: float = 0.0  # tokens of sequences with more than one new token


def fake_spec(
    vocab_size: int = 32768, max_position: int = 4096, eos_token_ids: Sequence[int] = ()
) -> ModelSpec:
    """The fake model: one full-attention layer, one head; float32, exact for ids below 2**24."""
    group = KVGroupSpec(layer_ids=(0,), kv_heads=1, head_dim=2, dtype=torch.float32)
    return ModelSpec(
        groups=(group,),
        vocab_size=vocab_size,
        max_position=max_position,
        eos_token_ids=tuple(eos_token_ids),
        fingerprint=f"fake-{vocab_size}",
        model_type="fake",
        dtype=torch.float32,
    )


def fake_next(ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], vocab_size: int) -> int:
    """The token after a context: a hash over (index, id, position) of each of its tokens."""
    index = np.arange(len(ids), dtype=np.uint64)
    mixed = (index + np.uint64(1)) * _MULTIPLIERS[0]
    mixed ^= (ids.astype(np.uint64) + np.uint64(1)) * _MULTIPLIERS[1]
    mixed ^= (positions.astype(np.uint64) + np.uint64(1)) * _MULTIPLIERS[2]
    mixed *= mixed | np.uint64(1)
    mixed ^= mixed >> np.uint64(29)
    mixed *= _MULTIPLIERS[0]
    return int((np.bitwise_xor.reduce(mixed) >> np.uint64(17)) % np.uint64(vocab_size))


def fake_generate(prompt: Sequence[int], n: int, vocab_size: int = 32768) -> list[int]:
    """The n tokens that a FakeEngine over correct memory gives after `prompt`."""
    context = list(prompt)
    for _ in range(n):
        ids = np.asarray(context, dtype=np.int64)
        context.append(fake_next(ids, np.arange(len(ids)), vocab_size))
    return context[len(prompt) :]


class FakeEngine:
    """An Engine (engine/batch.py) over the pool of `fake_spec`'s group. Sampling parameters change nothing
    but logprobs, which are made up yet deterministic."""

    def __init__(
        self, spec: ModelSpec, pool: MHAKVCache, timing: FakeTiming | None = None, overlap: bool = False
    ) -> None:
        self.spec = spec
        self._pool = pool
        self._page_size = pool.page_size
        self._timing = timing or FakeTiming()
        self._last_tokens = LastTokens()
        self._queue = LaunchQueue(overlap, "fake-engine")

    def launch(self, batch: ForwardBatch) -> Launched:
        """See Engine."""
        return self._queue.launch(lambda: self._forward(batch))

    def close(self) -> None:
        """See Engine."""
        self._queue.close()

    def _forward(self, batch: ForwardBatch) -> BatchResult:
        with self._last_tokens.owed(batch):
            return self._compute(batch)

    def _compute(self, batch: ForwardBatch) -> BatchResult:
        ids = self._last_tokens.resolve(batch)
        self._write(ids, batch)
        self._pretend(batch)
        tokens = np.array([self._next(batch, int(i)) for i in batch.sampled], dtype=np.int64)
        self._last_tokens.record(batch, tokens)
        logprobs: list[TokenLogprobs | None] = []
        for row, token in zip(batch.sampling, tokens.tolist(), strict=True):
            row.state.rewind(row.position)
            row.state.record(token)
            logprobs.append(self._logprobs(row, token))
        return BatchResult(tokens, logprobs)

    def _write(self, ids: npt.NDArray[np.int64], batch: ForwardBatch) -> None:
        pages, offsets = np.divmod(batch.out_slots, self._page_size)
        where = torch.from_numpy(pages), torch.from_numpy(offsets)
        data = self._pool.data
        data[where[0], 0, 0, 0, where[1]] = torch.from_numpy(ids).to(data.dtype)[:, None]
        data[where[0], 0, 1, 0, where[1]] = torch.from_numpy(batch.positions).to(data.dtype)[:, None]

    def _next(self, batch: ForwardBatch, i: int) -> int:
        length = int(batch.seq_lens[i])
        pages = batch.page_table[i, : -(-length // self._page_size)]
        context = self._pool.data[torch.from_numpy(pages.astype(np.int64)), 0, :, 0]
        ids, positions = context[..., 0].permute(1, 0, 2).reshape(2, -1)[:, :length].numpy().astype(np.int64)
        return fake_next(ids, positions, self.spec.vocab_size)

    def _pretend(self, batch: ForwardBatch) -> None:
        prefilled = int(batch.q_lens[batch.q_lens > 1].sum())
        seconds = self._timing.per_step_s + prefilled * self._timing.per_prefill_token_s
        if seconds:
            time.sleep(seconds)  # stands for computing: there is no event to await

    def _logprobs(self, row: SamplingRow, token: int) -> TokenLogprobs | None:
        count = row.state.params.top_logprobs
        if count is None:
            return None
        vocab = self.spec.vocab_size
        return TokenLogprobs(-0.5, [((token + k) % vocab, -0.5 - k) for k in range(count)])
