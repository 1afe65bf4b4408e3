"""Top-k, top-p and min-p over rows of scores: what is dropped gets -inf.

Ties are treated as in transformers: all tokens that tie with the k-th stay; of tokens that tie at top-p's
border those with the greater ids stay.

On the CPU every step works on the tokens that some row may still draw, because sorting a vocabulary of
150,000, and drawing its noise, takes longer than the model's last layer. On a GPU nothing is left out: how
many remain is known on the device only, and asking for it would wait for the forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from engine.cuda.draw import draw
from engine.token_counts import ToDevice
from wire.request import SamplingParams

_SLACK = 1 - 1e-4
"""The bound below which top-p keeps nothing is exact in real numbers. This covers float32's rounding."""


class Truncation:
    """The top-k, top-p and min-p of R rows that are drawn together."""

    def __init__(self, rows: Sequence[SamplingParams], vocab_size: int, to_device: ToDevice) -> None:
        """Rows whose temperature is 0 draw nothing, so nothing is dropped of them."""
        drawing = [params if params.temperature else SamplingParams() for params in rows]
        top_k = np.array([params.top_k if params.top_k < vocab_size else 0 for params in drawing], np.int64)
        self._most = int(top_k.max())
        self._kth = to_device(np.maximum(top_k - 1, 0)[:, None])
        self._has_k = to_device((top_k > 0)[:, None])
        self._top_k = to_device(top_k[:, None])
        top_p = np.array([params.top_p for params in drawing])
        self._may_drop = to_device((1 - top_p)[:, None]) if (top_p < 1).any() else None  # of the probability
        self._negligible = to_device(((1 - top_p) / vocab_size * _SLACK)[:, None])
        min_p = [math.log(params.min_p) if params.min_p else -math.inf for params in drawing]
        self._lowest = to_device(np.array(min_p, np.float32)[:, None]) if max(min_p) > -math.inf else None
        self._ids = to_device(np.arange(vocab_size))

    def apply(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [R, vocab], the best of each row 0. Returns the remaining ids [C] and their scores [R, C].

        The scores are changed in place.
        """
        ids = self._ids
        if self._most:
            best = scores.topk(self._most).values
            lowest = best.gather(1, self._kth)
            ids, scores = _without((scores < lowest).logical_and_(self._has_k), ids, scores)
        if self._may_drop is not None:
            ids, scores = self._top_p(ids, scores, self._may_drop)
        if self._lowest is not None:  # the same as a share of the best one's probability
            ids, scores = _without(scores < self._lowest, ids, scores)
        return ids, scores

    def draw(
        self,
        scores: torch.Tensor,
        temperatures: torch.Tensor,
        is_drawn: torch.Tensor,
        streams: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of scores [R, vocab] that are not yet relative to the best ones, and a draw from what
        remains, in one kernel. See engine/cuda/draw.py."""
        kth = scores.topk(self._most).values.gather(1, self._kth) if self._most else None
        top_k = self._top_k if self._most else None
        tokens: tuple[torch.Tensor, torch.Tensor] = draw(
            scores, temperatures, kth, top_k, self._may_drop, self._lowest, is_drawn, streams, positions
        )
        return tokens

    def _top_p(
        self, ids: torch.Tensor, scores: torch.Tensor, may_drop: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Drop the least likely tokens whose probabilities add up to at most `may_drop`, but never the best.

        A probability of at most may_drop / vocab never stays, because as many as there are add up to at most
        may_drop. Sums are in float64: in float32 that of a long tail has an error of 1e-5.
        """
        weights = scores.exp()
        total = weights.sum(-1, keepdim=True, dtype=torch.float64)
        ids, scores = _without(weights < self._negligible * total, ids, scores)
        ordered, order = scores.sort(dim=-1, stable=True)
        below = ordered.exp().double().cumsum(-1)
        dropped = below + (total - below[:, -1:]) <= may_drop * total
        dropped[:, -1] = False
        mask = torch.empty_like(dropped).scatter_(1, order, dropped)
        return ids, scores.masked_fill_(mask, -math.inf)


def _without(
    dropped: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give what is dropped (bool [R, C]) -inf, and on the CPU leave out the tokens that every row drops."""
    if scores.device.type == "cpu":
        columns = torch.nonzero(~dropped.all(0))[:, 0]
        if len(columns) < len(ids):
            ids, dropped = ids.index_select(0, columns), dropped.index_select(1, columns)
            scores = scores.index_select(1, columns)
    return ids, scores.masked_fill_(dropped, -math.inf)
