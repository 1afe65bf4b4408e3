"""The sampler of one row at a time: what engine/sampler.py must say, row by row.

It is written for reading: Python integers for the noise's key, a list of the row's remaining candidates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from wire.request import SamplingParams, TokenLogprobs

LOWEST_TEMPERATURE = 1e-6


@dataclass
class RowFailed(Exception):
    """The row has no token, and why."""

    why: str


@dataclass(frozen=True)
class Row:
    """What the next token of a sequence depends on besides its logits."""

    params: SamplingParams
    prompt: Sequence[int]
    eos: Sequence[int] = ()
    choice: int = 0
    outputs: Sequence[int] = ()

    @property
    def suppressed(self) -> tuple[int, ...]:
        """Ids that may not be sampled now."""
        if len(self.outputs) >= self.params.min_tokens:
            return ()
        return (*(() if self.params.ignore_eos else self.eos), *self.params.stop_token_ids)


def sample_row(logits: torch.Tensor, row: Row) -> tuple[int, TokenLogprobs | None]:
    """The next token of one sequence and its log-probabilities if asked for. `logits` any float [vocab].

    Raises RowFailed.
    """
    logits = logits.float()
    if not math.isfinite(float(logits.sum())):
        raise RowFailed("the model's logits are not finite")
    scores = process(logits, row)
    if not math.isfinite(float(scores.max())):
        raise RowFailed("no token may be sampled")
    if row.params.temperature == 0:
        token = int(scores.argmax())
    else:
        ids, scores = warp(scores, row.params)
        noise = gumbel(noise_key(row.params.seed, row.choice, len(row.outputs)), ids)
        token = int(ids[(scores + noise).argmax()])
    return token, token_logprobs(logits, token, row.params.top_logprobs)


def process(logits: torch.Tensor, row: Row) -> torch.Tensor:
    """Apply every step before the temperature. float32 [vocab] -> a new float32 [vocab]."""
    params = row.params
    scores = logits.clone()
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias))
        scores[ids] += torch.tensor(list(params.logit_bias.values()))
    if params.repetition_penalty != 1:
        seen = np.asarray([*row.prompt, *row.outputs])
        ids = torch.from_numpy(seen.astype(np.int64))
        old = scores[ids]  # a token seen twice is read and written twice, with the same values
        scores[ids] = torch.where(old < 0, old * params.repetition_penalty, old / params.repetition_penalty)
    if (params.frequency_penalty or params.presence_penalty) and row.outputs:
        occurring = Counter(row.outputs)
        ids = torch.tensor(list(occurring))
        counts = torch.tensor(list(occurring.values()), dtype=torch.float32)
        scores[ids] -= params.frequency_penalty * counts + params.presence_penalty
    if params.allowed_token_ids:
        others = sorted(set(range(len(scores))) - set(params.allowed_token_ids))
        scores[torch.tensor(others, dtype=torch.int64)] = -math.inf
    if row.suppressed:
        scores[torch.tensor(row.suppressed)] = -math.inf
    return scores


def warp(scores: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply temperature, top-k, top-p and min-p to float32 [vocab] scores. Returns remaining ids and scores.

    Scores are relative to the best one (0), so that no temperature above 0 overflows.
    """
    ids = torch.arange(len(scores))
    scores = (scores - scores.max()) / max(params.temperature, LOWEST_TEMPERATURE)
    if 0 < params.top_k < len(scores):
        ids = torch.nonzero(scores >= torch.topk(scores, params.top_k).values[-1])[:, 0]
        scores = scores[ids]
    if params.top_p < 1:
        kept = _top_p(scores, params.top_p)
        ids, scores = ids[kept], scores[kept]
    if params.min_p > 0:
        probabilities = scores.softmax(-1)
        kept = probabilities >= params.min_p * probabilities.amax()
        ids, scores = ids[kept], scores[kept]
    return ids, scores


def _top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Indices that stay: all but the least likely ones whose probabilities add up to at most 1 - top_p.

    A probability of at most (1 - top_p) / n never stays, because n of them add up to at most 1 - top_p. Such
    probabilities are summed, not sorted: sorting a vocabulary of 150,000 takes longer than the model's last
    layer.
    """
    weights = scores.exp().double()  # in float32 the sum of a long tail has an error of 1e-5
    probabilities = weights / weights.sum()
    may_stay = torch.nonzero(probabilities > (1 - top_p) / len(scores))[:, 0]
    if not len(may_stay):  # happens only by rounding, in a uniform distribution with a top_p of about 0
        return scores.argmax()[None]
    candidates = probabilities[may_stay]
    ordered, order = candidates.sort(stable=True)  # of equal ones the first are dropped
    dropped = 1 - candidates.sum() if len(may_stay) < len(scores) else 0.0
    kept = ordered.cumsum(-1) + dropped > 1 - top_p
    kept[-1] = True
    return may_stay[order[kept]].sort().values


def token_logprobs(logits: torch.Tensor, token: int, count: int | None) -> TokenLogprobs | None:
    """Log-probabilities of `token` and of the `count` best under float32 [vocab] logits; None if count is."""
    if count is None:
        return None
    logprobs = logits.log_softmax(-1)
    top: list[tuple[int, float]] = []
    if count:
        values, ids = logprobs.topk(min(count, len(logprobs)))
        top = list(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(float(logprobs[token]), top)


_MASK64 = (1 << 64) - 1


def _signed(value: int) -> int:
    """The int32 with the same bits as an unsigned 32-bit value."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def _splitmix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def noise_key(seed: int, choice: int, position: int) -> int:
    """The 64-bit key of one sampled position. Any Python int is a valid seed."""
    key = _splitmix(seed & _MASK64)
    key = _splitmix(key ^ (choice & _MASK64))
    return _splitmix(key ^ (position & _MASK64))


_MULTIPLIERS = (_signed(0x7FEB352D), _signed(0x846CA68B))


def _xor_shift(bits: torch.Tensor, shift: int) -> None:
    # >> of an int32 copies the sign bit; the mask makes it the logical shift
    bits ^= (bits >> shift) & ((1 << (32 - shift)) - 1)


def hash_bits(key: int, token_ids: torch.Tensor) -> torch.Tensor:
    """int32 [n] of uniformly distributed bits for `token_ids` (any integer dtype, [n])."""
    bits = token_ids.to(torch.int32, copy=True)
    for half in (_signed(key), _signed(key >> 32)):
        bits ^= half
        _xor_shift(bits, 16)
        bits *= _MULTIPLIERS[0]
        _xor_shift(bits, 15)
        bits *= _MULTIPLIERS[1]
        _xor_shift(bits, 16)
    return bits


def gumbel(key: int, token_ids: torch.Tensor) -> torch.Tensor:
    """float32 [n] standard Gumbel noise: argmax(logits + noise) is a draw from softmax(logits)."""
    # (unsigned bits + 1/2) / 2^32 is in (0, 1). The largest noise comes from the numbers near 0.
    unsigned = hash_bits(key, token_ids).double() % 2.0**32
    uniform = ((unsigned + 0.5) * 2.0**-32).float().clamp(max=1 - 2.0**-24)
    exponential = torch.log1p(uniform.neg_()).neg_()
    return exponential.log_().neg_()
