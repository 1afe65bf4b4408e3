"""The ranges of sampling parameters. Within them no parameter makes finite logits infinite or NaN.

The router's API refuses other values, and a worker checks again what a message brings: one request with an
infinite bias would otherwise fail in every batch that it joins.
"""

from __future__ import annotations

from typing import NamedTuple

from common.errors import InvalidRequest
from wire.request import SamplingParams


class ParamRange(NamedTuple):
    """`low` <= value <= `high`. NaN is in no range."""

    low: float
    high: float


TEMPERATURE = ParamRange(0.0, 100.0)
PROBABILITY = ParamRange(0.0, 1.0)  # top_p and min_p
PENALTY = ParamRange(-2.0, 2.0)  # presence_penalty and frequency_penalty, as in OpenAI's API
REPETITION_PENALTY = ParamRange(0.01, 100.0)  # logits are multiplied or divided by it
LOGIT_BIAS = ParamRange(-100.0, 100.0)  # as in OpenAI's API
MOST_TOP_LOGPROBS = 20
MOST_LOGPROB_TOKENS = 128
"""Named ones, which have log-probabilities at each output token."""
MOST_TAG_TOKENS = 64
"""Of a tag around thoughts."""
MOST_BAD_WORDS = 256
MOST_WORD_TOKENS = 256

_RANGES: dict[str, ParamRange] = {
    "temperature": TEMPERATURE,
    "top_p": PROBABILITY,
    "min_p": PROBABILITY,
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "repetition_penalty": REPETITION_PENALTY,
    "max_new_tokens": ParamRange(1, 2**31 - 1),
    "min_tokens": ParamRange(0, 2**31 - 1),
    "top_k": ParamRange(0, 2**31 - 1),
    "seed": ParamRange(0, 2**63 - 1),
}


def check_sampling(params: SamplingParams) -> None:
    """Raises InvalidRequest, with the parameter's name, if a value is outside its range."""
    for name, allowed in _RANGES.items():
        _check(name, getattr(params, name), allowed)
    for bias in params.logit_bias.values():
        _check("logit_bias", bias, LOGIT_BIAS)
    if params.thoughts is not None:
        _check("thoughts.tokens", params.thoughts.tokens, ParamRange(0, 2**31 - 1))
        _check("thoughts.closing", len(params.thoughts.closing), ParamRange(1, MOST_TAG_TOKENS))
        _check("thoughts.opening", len(params.thoughts.opening), ParamRange(0, MOST_TAG_TOKENS))
    _check("bad_words", len(params.bad_words), ParamRange(0, MOST_BAD_WORDS))
    for word in params.bad_words:
        _check("bad_words", len(word), ParamRange(1, MOST_WORD_TOKENS))
    _check("logprob_token_ids", len(params.logprob_token_ids), ParamRange(0, MOST_LOGPROB_TOKENS))
    if params.logprob_token_ids and params.top_logprobs is None:
        raise InvalidRequest("logprob_token_ids needs log-probabilities of the output", "logprob_token_ids")
    for name in ("top_logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None:
            _check(name, count, ParamRange(0, MOST_TOP_LOGPROBS))


def _check(name: str, value: float, allowed: ParamRange) -> None:
    if not allowed.low <= value <= allowed.high:
        raise InvalidRequest(f"{name} is {value}, outside [{allowed.low}, {allowed.high}]", name)
