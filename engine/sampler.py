"""Samples tokens from logits.

The steps have the order of transformers: logit bias, repetition penalty (prompt and output tokens), frequency
and presence penalties (output tokens only; transformers lacks them, OpenAI's definition applies), suppression
of ids that would stop a request before `min_tokens`, temperature, top-k, top-p, min-p. Reported
log-probabilities are those of the model before any of these steps, as in OpenAI's API.

Truncation works on (candidate ids, scores) instead of a masked vocabulary, so the cost of every step after
top-k, the noise included, depends only on the number of candidates. Ties are treated as in transformers: all
tokens that tie with the k-th stay.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import SamplingRow
from engine.errors import RowFailed
from engine.noise import gumbel, noise_key
from engine.sampling_state import SamplingState
from wire.request import SamplingParams, TokenLogprobs

log = logging.getLogger(__name__)

LOWEST_TEMPERATURE = 1e-6
"""Lower temperatures sample like this one: the best token, or one whose score is within rounding of it."""


class Sampled(NamedTuple):
    """A token per row, its log-probabilities if they were asked for, and row -> why it has no token.

    A row that failed has some token of the vocabulary in `tokens`: a forward that was launched already may
    take it as input. Its result is not used either.
    """

    tokens: npt.NDArray[np.int64]
    logprobs: list[TokenLogprobs | None]
    failures: dict[int, str]


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Sampled:
    """Sample one token per row of `logits` [N, vocab], any float dtype, and record it in the rows' states.

    A row fails alone, whatever it holds.
    """
    for row in rows:
        row.state.rewind(row.position)
    tokens = logits.argmax(-1).tolist()  # the result for plain greedy rows
    # The sum of a row is finite only if all of its logits are. It takes a tenth of the time of argmax, and
    # aminmax takes four times as long as argmax.
    finite = logits.sum(-1, dtype=torch.float32).isfinite().tolist()
    logprobs: list[TokenLogprobs | None] = [None] * len(rows)
    failures: dict[int, str] = {}
    for i, row in enumerate(rows):
        if not finite[i]:
            failures[i] = "the model's logits are not finite"
        elif not row.state.plain_greedy:
            try:
                tokens[i], logprobs[i] = _sample_special(logits[i].float(), row.state)
            except RowFailed as error:
                failures[i] = str(error)
            except Exception as error:
                log.exception("a bug while sampling")
                failures[i] = f"sampling failed: {type(error).__name__}: {error}"
        row.state.record(tokens[i])
    return Sampled(np.asarray(tokens, dtype=np.int64), logprobs, failures)


def _sample_special(logits: torch.Tensor, state: SamplingState) -> tuple[int, TokenLogprobs | None]:
    """The next token of a sequence that is not plain greedy, and its log-probabilities if asked for."""
    token = sample_row(logits, state)
    return token, token_logprobs(logits, token, state.params.top_logprobs)


def sample_row(logits: torch.Tensor, state: SamplingState) -> int:
    """The next token of one sequence. `logits` float32 [vocab].

    Raises RowFailed if there is no best score: bias and penalties made it infinite or NaN, or no token may be
    sampled.
    """
    params = state.params
    scores = process(logits, state)
    if not math.isfinite(float(scores.max())):  # a NaN is the maximum; single scores may be -inf
        raise RowFailed("the logits are not finite after bias and penalties")
    if params.temperature == 0:
        return int(scores.argmax())
    ids, scores = warp(scores, params)
    noise = gumbel(noise_key(params.seed, state.choice, len(state.outputs)), ids)
    return int(ids[(scores + noise).argmax()])


def process(logits: torch.Tensor, state: SamplingState) -> torch.Tensor:
    """Apply every step before the temperature. float32 [vocab] -> a new float32 [vocab]."""
    params = state.params
    scores = logits.clone()
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=scores.device)
        scores[ids] += torch.tensor(list(params.logit_bias.values()), device=scores.device)
    if params.repetition_penalty != 1:
        seen = np.concatenate([state.prompt_ids, np.asarray(state.outputs, dtype=np.int32)])
        ids = torch.from_numpy(seen.astype(np.int64)).to(scores.device)
        old = scores[ids]  # a token seen twice is read and written twice, with the same values
        scores[ids] = torch.where(old < 0, old * params.repetition_penalty, old / params.repetition_penalty)
    if (params.frequency_penalty or params.presence_penalty) and state.output_counts:
        ids = torch.tensor(list(state.output_counts), device=scores.device)
        counts = torch.tensor(list(state.output_counts.values()), dtype=torch.float32, device=scores.device)
        scores[ids] -= params.frequency_penalty * counts + params.presence_penalty
    if state.suppressed:
        scores[torch.tensor(state.suppressed, device=scores.device)] = -math.inf
    return scores


def warp(scores: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply temperature, top-k, top-p and min-p to float32 [vocab] scores. Returns remaining ids and scores.

    Scores are relative to the best one (0), so that no temperature above 0 overflows.
    """
    ids = torch.arange(len(scores), device=scores.device)
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
    probabilities = scores.softmax(-1)
    may_stay = torch.nonzero(probabilities > (1 - top_p) / len(scores))[:, 0]
    if not len(may_stay):  # happens only by rounding, in a uniform distribution with a top_p of about 0
        return scores.argmax()[None]
    candidates = probabilities[may_stay].double()  # in float32 the sum of a long tail has an error of 1e-5
    ordered, order = candidates.sort()
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
