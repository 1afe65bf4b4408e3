"""SamplingBlock: rows of a batch whose tokens are chosen together, with their parameters as tensors.

The steps have the order of transformers: logit bias, repetition penalty (prompt and output tokens), frequency
and presence penalties (output tokens only; transformers lacks them, OpenAI's definition applies), suppression
of ids that would stop a request before `min_tokens`, or of all that a grammar does not allow, temperature,
top-k, top-p, min-p.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.argmax import argmax
from engine.cuda.draw import draws_by_kernel
from engine.noise import gumbel, noise_keys
from engine.sampling_state import SamplingState
from engine.token_counts import ToDevice, TokenCounts
from engine.token_masks import TokenMasks
from engine.truncation import Truncation

LOWEST_TEMPERATURE = 1e-6
"""Lower temperatures sample like this one: the best token, or one whose score is within rounding of it."""

Step = Callable[[torch.Tensor, torch.Tensor], object]
"""Changes scores float32 [R, vocab] in place, for output positions int64 [R]."""


class SamplingBlock:
    """R rows of a batch. Nothing here depends on the data, so it is built once for a batch's membership."""

    def __init__(
        self,
        rows: Sequence[int],
        states: Sequence[SamplingState],
        counts: TokenCounts,
        masks: TokenMasks,
        vocab_size: int,
        to_device: ToDevice,
    ) -> None:
        """`rows` [R] are the places of `states` in the batch. All of their token ids are below vocab_size."""
        self.rows = to_device(np.array(rows, dtype=np.int64))
        self._is_prefix = list(rows) == list(range(len(rows)))
        self._steps: list[Step] = []
        if any(state.params.logit_bias for state in states):
            self._steps.append(_bias(states, to_device))
        if any(state.is_penalised for state in states):
            self._steps.append(_penalties(states, counts, to_device))
        if any(state.params.allowed_token_ids for state in states):
            self._steps.append(_only_allowed(states, to_device))
        if any(state.banned for state in states):
            self._steps.append(_bans(states, to_device))
        if any(state.is_masked for state in states):
            self._steps.append(_masks(states, masks, to_device))
        params = [state.params for state in states]
        self._draws = any(each.temperature for each in params)
        temperatures = [
            max(each.temperature, LOWEST_TEMPERATURE) if each.temperature else 1 for each in params
        ]
        self._temperatures = to_device(np.array(temperatures, np.float32)[:, None])
        self._is_drawn = to_device(np.array([[each.temperature > 0] for each in params], np.float32))
        self._truncation = Truncation(params, vocab_size, to_device)
        self._streams = to_device(np.array([state.stream for state in states], np.int64))

    def choose(self, logits: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a batch's logits [N, vocab] and output positions [N]: tokens int64 [R], and whether each is one.

        It is none if there is no best score: bias and penalties made it infinite or NaN, or no token may be
        sampled.
        """
        by_kernel = self._draws and draws_by_kernel(logits.device)
        if by_kernel and not self._steps and self._is_prefix and len(self.rows) == len(logits):
            return self._draw(logits, positions)  # nothing is copied
        scores = logits.index_select(0, self.rows).float()
        positions = positions.index_select(0, self.rows)
        for step in self._steps:
            step(scores, positions)
        if by_kernel:
            return self._draw(scores, positions)
        best = scores.amax(-1, keepdim=True)  # a NaN is the maximum; single scores may be -inf
        is_valid = best.isfinite()
        if not self._draws:
            return argmax(scores).tokens, is_valid[:, 0]
        # Relative to the best one (0), so that no temperature above 0 overflows. A row without a best score
        # becomes NaN, which nothing drops: it has some token, too.
        scores.sub_(best).div_(self._temperatures)
        ids, scores = self._truncation.apply(scores)
        scores.add_(gumbel(noise_keys(self._streams, positions), ids).mul_(self._is_drawn))
        return ids.index_select(0, argmax(scores).tokens), is_valid[:, 0]

    def _draw(self, scores: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._truncation.draw(scores, self._temperatures, self._is_drawn, self._streams, positions)


def _bias(states: Sequence[SamplingState], to_device: ToDevice) -> Step:
    width = max(len(state.params.logit_bias) for state in states)
    ids = np.zeros((len(states), width), dtype=np.int64)  # the rest adds 0 to token 0
    values = np.zeros((len(states), width), dtype=np.float32)
    for i, state in enumerate(states):
        bias = state.params.logit_bias
        ids[i, : len(bias)], values[i, : len(bias)] = list(bias), list(bias.values())
    places, addends = to_device(ids), to_device(values)
    return lambda scores, _: scores.scatter_add_(1, places, addends)


def _only_allowed(states: Sequence[SamplingState], to_device: ToDevice) -> Step:
    where = [i for i, state in enumerate(states) if state.params.allowed_token_ids]
    allowed = [states[i].params.allowed_token_ids for i in where]
    ids = np.zeros((len(where), max(map(len, allowed))), dtype=np.int64)
    for i, tokens in enumerate(allowed):  # the rest repeats a row's first id: each place has one value
        ids[i] = [*tokens, *[tokens[0]] * (ids.shape[1] - len(tokens))]
    places, rows = to_device(ids), to_device(np.array(where, np.int64))

    def allow(scores: torch.Tensor, _: torch.Tensor) -> None:
        kept = scores.index_select(0, rows).gather(1, places)
        only = scores.new_full((len(where), scores.shape[1]), -math.inf).scatter_(1, places, kept)
        scores.index_copy_(0, rows, only)

    return allow


def _bans(states: Sequence[SamplingState], to_device: ToDevice) -> Step:
    width = max(len(state.banned) for state in states)
    ids = np.zeros((len(states), width), dtype=np.int64)
    for i, state in enumerate(states):  # the rest repeats a row's first id: each place has one value
        ids[i] = [*state.banned, *[state.banned[0]] * (width - len(state.banned))] if state.banned else 0
    ends = [state.params.min_tokens if state.banned else 0 for state in states]
    places, until = to_device(ids), to_device(np.array(ends, np.int64))

    def ban(scores: torch.Tensor, positions: torch.Tensor) -> None:
        is_banning = (positions < until)[:, None]
        scores.scatter_(1, places, scores.gather(1, places).masked_fill_(is_banning, -math.inf))

    return ban


def _masks(states: Sequence[SamplingState], masks: TokenMasks, to_device: ToDevice) -> Step:
    """What a byte of bits adds to the scores of its eight tokens comes from a table. On the CPU that takes a
    seventh of the time of masked_fill_ with the bits unpacked."""
    slots = to_device(masks.slots(states))
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    table = to_device(np.where(bits, np.float32(0), np.float32(-math.inf)))  # [256, 8]

    def mask(scores: torch.Tensor, _: torch.Tensor) -> None:
        chosen = masks.bits.index_select(0, slots)
        addends = table.index_select(0, chosen.view(-1).to(torch.int32)).view(len(slots), -1)
        scores.add_(addends[:, : scores.shape[1]])

    return mask


def _penalties(states: Sequence[SamplingState], counts: TokenCounts, to_device: ToDevice) -> Step:
    where = [i for i, state in enumerate(states) if state.is_penalised]
    penalised = [states[i] for i in where]
    params = [state.params for state in penalised]
    repetition = _column([each.repetition_penalty for each in params], 1.0, to_device)
    frequency = _column([each.frequency_penalty for each in params], 0.0, to_device)
    presence = _column([each.presence_penalty for each in params], 0.0, to_device)
    slots = to_device(counts.slots(penalised))
    rows = to_device(np.array(where, np.int64)) if len(where) < len(states) else None

    def penalise(scores: torch.Tensor, _: torch.Tensor) -> None:
        part = scores if rows is None else scores.index_select(0, rows)
        if repetition is not None:
            lowered = torch.where(part < 0, part * repetition, part / repetition)
            torch.where(counts.seen.index_select(0, slots), lowered, part, out=part)
        if frequency is not None or presence is not None:
            outputs = counts.outputs.index_select(0, slots)
            lowered = outputs * (0.0 if frequency is None else frequency)
            part -= lowered if presence is None else lowered.add_((outputs > 0) * presence)
        if rows is not None:
            scores.index_copy_(0, rows, part)

    return penalise


def _column(values: list[float], neutral: float, to_device: ToDevice) -> torch.Tensor | None:
    """float32 [n, 1]; None if all are neutral. Each penalty reads the vocabulary several times."""
    if all(value == neutral for value in values):
        return None
    return to_device(np.array(values, np.float32)[:, None])
