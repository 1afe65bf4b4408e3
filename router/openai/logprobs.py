"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from typing import Any

from router.detokenize import DetokenizerFactory
from wire.messages import TokenLogprobs


def chat_logprobs(
    detokenizers: DetokenizerFactory, tokens: list[int], logprobs: list[TokenLogprobs]
) -> dict[str, Any]:
    """For chat: one entry per token with its bytes and alternatives."""
    return {
        "content": [
            {
                **_named(detokenizers, token, entry.logprob),
                "top_logprobs": [_named(detokenizers, other, logprob) for other, logprob in entry.top],
            }
            for token, entry in zip(tokens, logprobs, strict=True)
        ],
        "refusal": None,
    }


def completion_logprobs(
    detokenizers: DetokenizerFactory, tokens: list[int], logprobs: list[TokenLogprobs], offset: int
) -> dict[str, Any]:
    """For completions: parallel lists. `offset` is where in the text the first of these tokens begins."""
    names = [_text(detokenizers, token) for token in tokens]
    offsets = []
    for name in names:
        offsets.append(offset)
        offset += len(name)
    return {
        "tokens": names,
        "token_logprobs": [entry.logprob for entry in logprobs],
        "top_logprobs": [
            {_text(detokenizers, other): logprob for other, logprob in entry.top} for entry in logprobs
        ],
        "text_offset": offsets,
    }


def _named(detokenizers: DetokenizerFactory, token: int, logprob: float) -> dict[str, Any]:
    raw = detokenizers.token_bytes(token)
    return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}


def _text(detokenizers: DetokenizerFactory, token: int) -> str:
    return detokenizers.token_bytes(token).decode("utf-8", "replace")
