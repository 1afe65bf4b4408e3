"""A deterministic engine without a model. Its output depends on the memory that it reads.

    full     writes the id and position of every token to its KV slot, and reads all of them back
    window   does the same in the window group's slots, and reads the last `window` of them back
    state    keeps a running hash of the sequence, and the number of tokens seen

The next token is a hash of everything that was READ BACK, in page-table order. A page or state that was
lost, exchanged, stale or shared by mistake changes the output, as it would with a model. `fake_generate`
computes the expected tokens without using any memory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import BatchResult, ForwardBatch
from engine.last_tokens import LastTokens
from engine.launch import Launched, LaunchQueue, Read
from engine.sampling_state import SamplingState
from engine.spec import ModelSpec
from kvcache.layout import GroupSpec, KVGroupSpec, StateGroupSpec, StateTensor
from kvcache.pool import KVCache, MambaPool, MHAKVCache
from wire.request import TokenLogprobs

FAKE_WINDOW = 40
"""Tokens that a windowed fake layer sees: more than a page, and not a multiple of most page sizes."""

_MULTIPLIERS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], dtype=np.uint64)
_STATE_LAYER, _STATE_TENSOR = 2, "seen"

Hashes = npt.NDArray[np.uint64]
Tokens = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]  # ids, positions


@dataclass(frozen=True)
class FakeTiming:
    """How long a forward sleeps to simulate computing, in seconds."""

    per_step_s: float = 0.0
    per_prefill_token_s: float = 0.0  # tokens of sequences with more than one new token


def fake_spec(
    vocab_size: int = 32768,
    max_position: int = 4096,
    eos_token_ids: Sequence[int] = (),
    groups: Sequence[str] = (),
    window: int = FAKE_WINDOW,
) -> ModelSpec:
    """The fake model: one full-attention layer with one head, in float32, exact for ids below 2**24.

    `groups` adds layers of other kinds: "window" (sees `window` tokens) and "state".
    """
    assert set(groups) <= {"window", "state"}, f"the fake model has no such groups: {groups}"
    specs: list[GroupSpec] = [KVGroupSpec(layer_ids=(0,), kv_heads=1, head_dim=2, dtype=torch.float32)]
    if "window" in groups:
        specs.append(KVGroupSpec((1,), 1, 2, torch.float32, name="window", window=window))
    if "state" in groups:
        specs.append(StateGroupSpec((StateTensor(_STATE_LAYER, _STATE_TENSOR, (2,), torch.int64),)))
    named = "".join(f"-{spec.name}" for spec in specs[1:])
    return ModelSpec(
        groups=tuple(specs),
        vocab_size=vocab_size,
        max_position=max_position,
        eos_token_ids=tuple(eos_token_ids),
        fingerprint=f"fake-{vocab_size}{named}",
        model_type="fake",
        dtype=torch.float32,
    )


def _mixed(ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], first: int = 0) -> Hashes:
    """A hash per token of its place in the sequence (counted from `first`), its id and its position."""
    index = np.arange(first, first + len(ids)).astype(np.uint64)
    mixed: Hashes = (index + np.uint64(1)) * _MULTIPLIERS[0]
    mixed ^= (ids.astype(np.uint64) + np.uint64(1)) * _MULTIPLIERS[1]
    mixed ^= (positions.astype(np.uint64) + np.uint64(1)) * _MULTIPLIERS[2]
    mixed *= mixed | np.uint64(1)
    mixed ^= mixed >> np.uint64(29)
    mixed *= _MULTIPLIERS[0]
    return mixed


def _absorbed(state: npt.NDArray[np.int64], tokens: Tokens) -> npt.NDArray[np.int64]:
    """The state `[hash, tokens seen]` after `tokens`. The hash depends on their order."""
    ids, positions = tokens
    powers = np.full(len(ids) + 1, _MULTIPLIERS[1])
    powers[0] = 1
    terms = np.concatenate([state[:1].view(np.uint64), _mixed(ids, positions, int(state[1]))])
    total = (terms * np.cumprod(powers)[::-1]).sum(keepdims=True)
    return np.concatenate([total.view(np.int64), state[1:] + len(ids)])


def _next_token(
    full: Tokens, window: Tokens | None, state: npt.NDArray[np.int64] | None, vocab_size: int
) -> int:
    """The token after a context, computed from what each group holds of the context."""
    total = np.bitwise_xor.reduce(_mixed(*full), keepdims=True)
    if window is not None:
        total += np.bitwise_xor.reduce(_mixed(*window), keepdims=True) * _MULTIPLIERS[1]
    if state is not None:
        mixed = state.view(np.uint64) * _MULTIPLIERS[1:]
        total += mixed[:1] ^ mixed[1:]
    return int((total[0] >> np.uint64(17)) % np.uint64(vocab_size))


def fake_generate(
    prompt: Sequence[int],
    n: int,
    vocab_size: int = 32768,
    groups: Sequence[str] = (),
    window: int = FAKE_WINDOW,
) -> list[int]:
    """The n tokens that a FakeEngine generates after `prompt` if its memory is correct."""
    context = list(prompt)
    state = _absorbed(
        np.zeros(2, dtype=np.int64), (np.array(context[:-1], np.int64), np.arange(len(prompt) - 1))
    )
    for _ in range(n):
        ids, positions = np.array(context, dtype=np.int64), np.arange(len(context))
        seen = (ids[-window:], positions[-window:]) if "window" in groups else None
        state = _absorbed(state, (ids[-1:], positions[-1:]))
        context.append(_next_token((ids, positions), seen, state if "state" in groups else None, vocab_size))
    return context[len(prompt) :]


class FakeEngine:
    """An Engine (engine/batch.py) over the pools of `fake_spec`'s groups, given by name.

    The only sampling parameters that have an effect are those of log-probabilities, which are made up but
    deterministic.
    """

    grammars = None

    def __init__(
        self,
        spec: ModelSpec,
        pools: Mapping[str, KVCache],
        timing: FakeTiming | None = None,
        overlap: bool = False,
    ) -> None:
        self.spec = spec
        self._full = _Layer(pools["full"])
        self._window = _Layer(pools["window"]) if "window" in pools else None
        self._reach = next((s.window or 0 for s in spec.groups if isinstance(s, KVGroupSpec) and s.window), 0)
        self._states: npt.NDArray[np.int64] | None = None
        if "state" in pools:
            pool = pools["state"]
            assert isinstance(pool, MambaPool)
            self._states = pool.tensor(_STATE_LAYER, _STATE_TENSOR).numpy()
        self._timing = timing or FakeTiming()
        self._last_tokens = LastTokens()
        self._queue = LaunchQueue(overlap, "fake-engine")

    def launch(self, batch: ForwardBatch) -> Launched:
        return self._queue.launch(lambda: self._forward(batch))

    def close(self) -> None:
        self._queue.close()

    def _forward(self, batch: ForwardBatch) -> Read:
        with self._last_tokens.placeholders_on_failure(batch):
            result = self._compute(batch)
        return lambda: result

    def _compute(self, batch: ForwardBatch) -> BatchResult:
        ids = self._last_tokens.resolve(batch).numpy()
        positions = self._seen_positions(batch)
        self._full.write(ids, positions, batch.out_slots)
        if self._window is not None:
            self._window.write(ids, positions, batch.for_window().out_slots)
        states = self._advance_states(ids, batch)
        self._pretend(batch)
        tokens = np.array([self._next(batch, i, states) for i in batch.sampled.tolist()], dtype=np.int64)
        self._last_tokens.record(batch, tokens)
        logprobs: list[TokenLogprobs | None] = []
        for state, token in zip(batch.sampling.states, tokens.tolist(), strict=True):
            logprobs.append(self._logprobs(state, token))
        scored = {
            one.sequence: [self._score(token, one.best) for token in one.targets.tolist()]
            for one in batch.scored
        }
        starts = batch.starts()
        pooled = {
            one.sequence: _hidden_sum(ids[starts[one.sequence] + one.skip : starts[one.sequence + 1]])
            for one in batch.pooled
        }
        return BatchResult(tokens, logprobs, scored=scored, pooled=pooled)

    def _seen_positions(self, batch: ForwardBatch) -> npt.NDArray[np.int64]:
        """The positions to write. They are wrong for a chunk whose first token sees other tokens in the
        window group than in the full group.

        Only the last token's view is hashed. Wrong positions make an error in an earlier token's window
        visible in the output too.
        """
        if self._window is None:
            return batch.positions
        positions = batch.positions.copy()
        window, starts = batch.for_window(), batch.starts()
        for i in np.flatnonzero(batch.q_lens > 1).tolist():
            end = int(batch.seq_lens[i] - batch.q_lens[i])
            first = max(0, end + 1 - self._reach)
            seen = self._window.read(window.page_table[i], first, end)
            if not np.array_equal(seen, self._full.read(batch.page_table[i], first, end)):
                positions[starts[i] : starts[i + 1]] += 1
        return positions

    def _advance_states(
        self, ids: npt.NDArray[np.int64], batch: ForwardBatch
    ) -> list[npt.NDArray[np.int64]] | None:
        """Compute each sequence's state after this step, and write it to its slot."""
        if self._states is None:
            return None
        assert batch.state is not None, "the batch was built without state slots"
        before = self._states[batch.state.reads]
        before[batch.state.reads == 0] = 0
        starts = batch.starts().tolist()
        after = [
            _absorbed(state, (ids[start:end], batch.positions[start:end]))
            for state, start, end in zip(before, starts, starts[1:], strict=False)
        ]
        self._states[batch.state.writes] = after
        return after

    def _next(self, batch: ForwardBatch, i: int, states: list[npt.NDArray[np.int64]] | None) -> int:
        length = int(batch.seq_lens[i])
        window: Tokens | None = None
        if self._window is not None:
            window = self._window.read(batch.for_window().page_table[i], max(0, length - self._reach), length)
        full = self._full.read(batch.page_table[i], 0, length)
        return _next_token(full, window, None if states is None else states[i], self.spec.vocab_size)

    def _pretend(self, batch: ForwardBatch) -> None:
        prefilled = int(batch.q_lens[batch.q_lens > 1].sum())
        seconds = self._timing.per_step_s + prefilled * self._timing.per_prefill_token_s
        if seconds:
            time.sleep(seconds)

    def _score(self, token: int, best: int) -> TokenLogprobs:
        """Of a token of a prompt."""
        vocab = self.spec.vocab_size
        return TokenLogprobs(-token / vocab, [((token + k) % vocab, -token / vocab - k) for k in range(best)])

    def _logprobs(self, state: SamplingState, token: int) -> TokenLogprobs | None:
        count = state.params.top_logprobs
        if count is None:
            return None
        vocab = self.spec.vocab_size
        named = [(one, -one / vocab) for one in state.params.logprob_token_ids]
        return TokenLogprobs(-0.5, [((token + k) % vocab, -0.5 - k) for k in range(count)] + named)


def _hidden_sum(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Of tokens whose hidden states are [id, 1]."""
    return np.array([ids.sum(), len(ids)], dtype=np.float32)


class _Layer:
    """A layer whose key is the token's id and whose value is the token's position."""

    def __init__(self, pool: KVCache) -> None:
        assert isinstance(pool, MHAKVCache)
        self._page_size = pool.page_size
        self._data = pool.data[:, 0, :, 0]  # [page, K or V, offset, head_dim]

    def write(
        self, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]
    ) -> None:
        pages, offsets = (torch.from_numpy(part) for part in np.divmod(slots, self._page_size))
        for side, values in enumerate((ids, positions)):
            self._data[pages, side, offsets] = torch.from_numpy(values).to(self._data.dtype)[:, None]

    def read(self, table: npt.NDArray[np.int32], start: int, end: int) -> Tokens:
        """Ids and positions of tokens [start, end) of a sequence, read from the pages of its table."""
        first = start // self._page_size
        pages = torch.from_numpy(table[first : -(-end // self._page_size)].astype(np.int64))
        both = self._data[pages][..., 0].permute(1, 0, 2).reshape(2, -1).numpy().astype(np.int64)
        skipped = start - first * self._page_size
        ids, positions = both[:, skipped : skipped + end - start]
        return ids, positions
