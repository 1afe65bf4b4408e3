"""Sampler: the next token of every row of a batch, in tensors over its rows.

Rows that take the argmax of their logits need nothing else. The others are in blocks
(engine/sampling_block.py) and those that ask for log-probabilities in reports (engine/reported_logprobs.py),
which hold the parameters as tensors. Both are built when the batch's membership changes. A step then runs no
Python per row, moves nothing to the device but the positions, and makes one copy to the host. Only rows with
a grammar or bad words (engine/token_masks.py) need the host in every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.argmax import Argmax, argmax
from engine.batch import SamplingRows
from engine.completion import Completions, HostCompletions
from engine.reported_logprobs import ReportedLogprobs
from engine.sampling_block import SamplingBlock
from engine.sampling_state import SamplingState
from engine.token_counts import ToDevice, TokenCounts
from engine.token_masks import TokenMasks
from wire.request import TokenLogprobs

_CACHED_SCORES = 1 << 18
"""Scores of a block on the CPU: a megabyte stays in the second-level cache through some forty operators."""

_FINE, _BAD_LOGITS, _ALL_MASKED = 0, 1, 2
_BAD = "the model's logits are not finite"
_MASKED = "no token may be sampled: what the request allows is what it forbids, or forbids until min_tokens"


class Sampled(NamedTuple):
    """A token per row, its log-probabilities if they were asked for, and row -> why it has no token.

    A row that failed has some token of the vocabulary in `tokens`: a forward that was launched already may
    take it as input. Its result is not used either.
    """

    tokens: npt.NDArray[np.int64]
    logprobs: list[TokenLogprobs | None]
    failures: dict[int, str]
    refusals: dict[int, str]  # the same, where what the request asks for allows no token


@dataclass(frozen=True, slots=True)
class LaunchedSample:
    """What one step samples, on the device."""

    tokens: torch.Tensor  # int64 [N]
    packed: torch.Tensor  # int32: all that the host wants to know, to be copied at once
    reports: Sequence[ReportedLogprobs]
    broken: dict[int, str]  # rows whose parameters cannot be used
    refusals: dict[int, str]

    def read(self, packed: npt.NDArray[np.int32]) -> Sampled:
        """What `self.packed` says, once it is on the host."""
        n = len(self.tokens)
        logprobs: list[TokenLogprobs | None] = [None] * n
        status, rest = packed[n : 2 * n], packed[2 * n :]
        failures = {int(i): _BAD for i in np.flatnonzero(status == _BAD_LOGITS)}
        masked = {int(i): _MASKED for i in np.flatnonzero(status == _ALL_MASKED)}
        for report in self.reports:
            rest = report.read(rest, logprobs)
        return Sampled(packed[:n].astype(np.int64), logprobs, self.broken | failures, masked | self.refusals)

    def wait(self) -> Sampled:
        """Copy it to the host and read it."""
        return self.read(self.packed.cpu().numpy())


def read_argmax(tokens: npt.NDArray[np.int64], is_finite: npt.NDArray[np.int64]) -> Sampled:
    """What is sampled where Sampler.takes_argmax."""
    failures = {int(i): _BAD for i in np.flatnonzero(is_finite == 0)}
    return Sampled(tokens, [None] * len(tokens), failures, {})


class Sampler:
    """Samples batch after batch of one model. Used while a forward is issued."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        to_device: ToDevice | None = None,
        completions: Completions | None = None,
    ) -> None:
        """`to_device` moves parameters to the device when a batch's membership changes, and masks of grammars
        in every step. `completions` are those of the device, by default the CPU's."""
        self._vocab_size = vocab_size
        self._to_device = to_device or (lambda array: torch.from_numpy(array).to(device))
        self._most_rows = max(_CACHED_SCORES // vocab_size, 1) if device.type == "cpu" else 1 << 30
        self._counts = TokenCounts(vocab_size, device, self._to_device)
        self._masks = TokenMasks(vocab_size, self._to_device, (completions or HostCompletions()).record)
        self._states: tuple[SamplingState, ...] | None = ()  # None: the last join failed
        self._blocks: list[SamplingBlock] = []
        self._reports: list[ReportedLogprobs] = []
        self._broken: dict[int, str] = {}

    def takes_argmax(self, states: tuple[SamplingState, ...]) -> bool:
        """Whether all that is wanted of these rows is the argmax of their logits, if they are finite."""
        if states != self._states:
            self._join(states)
        return not (self._blocks or self._reports or self._broken)

    def sample(
        self,
        logits: torch.Tensor,
        rows: SamplingRows,
        positions: torch.Tensor,
        best: Argmax | None = None,
    ) -> LaunchedSample:
        """Sample a token of each row of `logits` [N, vocab], any float dtype.

        `positions` is `rows.positions` on the device, `best` the argmax of the logits if it is known. Nothing
        waits for the device. A row fails alone.
        """
        if rows.states != self._states:
            self._join(rows.states)
        self._counts.follow(rows.positions)
        self._masks.follow(rows.positions)
        if best is None:
            tokens, is_finite = argmax(logits)
        else:
            tokens, is_finite = best.tokens.clone(), best.is_finite
        status = torch.zeros_like(tokens, dtype=torch.int32)
        for block in self._blocks:
            chosen, is_valid = block.choose(logits, positions)
            tokens.index_copy_(0, block.rows, chosen)
            status.index_copy_(0, block.rows, torch.where(is_valid, _FINE, _ALL_MASKED).to(torch.int32))
        status.masked_fill_(~is_finite, _BAD_LOGITS)
        self._counts.add(tokens)
        self._masks.add(tokens, rows.positions)
        packed = [tokens.to(torch.int32), status]
        for report in self._reports:
            packed += report.compute(logits, tokens)
        return LaunchedSample(tokens, torch.cat(packed), self._reports, self._broken, self._masks.refusals)

    def _join(self, states: tuple[SamplingState, ...]) -> None:
        """Other sequences are sampled from now on, or in another order."""
        self._states = None  # until it is done: the device may be out of memory
        self._counts.join(states)
        self._masks.join(states)
        self._broken = {i: why for i, state in enumerate(states) if (why := self._unusable(state))}
        chosen = [i for i, state in enumerate(states) if not (state.takes_argmax or i in self._broken)]
        chosen.sort(key=lambda i: _kind(states[i]))  # so that few blocks have every step
        self._blocks = [
            SamplingBlock(
                part,
                [states[i] for i in part],
                self._counts,
                self._masks,
                self._vocab_size,
                self._to_device,
            )
            for part in self._split(chosen)
        ]
        asking = [i for i, state in enumerate(states) if state.params.top_logprobs is not None]
        reported = [i for i in asking if i not in self._broken]
        self._reports = [
            ReportedLogprobs(part, [states[i] for i in part], self._vocab_size, self._to_device)
            for part in self._split(reported)
        ]
        self._states = states

    def _unusable(self, state: SamplingState) -> str:
        params = state.params
        for name, ids in (
            ("logit_bias", params.logit_bias),
            ("allowed_token_ids", params.allowed_token_ids),
            ("a stop token", state.banned),
            ("logprob_token_ids", params.logprob_token_ids),
        ):
            if any(not 0 <= token < self._vocab_size for token in ids):
                return f"{name} is outside the vocabulary"
        return ""

    def _split(self, rows: list[int]) -> Iterator[list[int]]:
        return (rows[i : i + self._most_rows] for i in range(0, len(rows), self._most_rows))


def _kind(state: SamplingState) -> tuple[bool, ...]:
    params = state.params
    return (
        params.temperature > 0,
        params.top_k > 0,
        params.top_p < 1,
        state.is_penalised,
        bool(params.allowed_token_ids),
        state.is_masked,
    )
