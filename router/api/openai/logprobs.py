"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from typing import Any

from router.text.detokenize import DetokenizerFactory
from wire.request import TokenLogprobs


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
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(detokenizers.token_bytes(token).decode("utf-8", "replace"))
    return {
        "tokens": [_name(detokenizers, token) for token in tokens],
        "token_logprobs": [entry.logprob for entry in logprobs],
        "top_logprobs": [
            {_name(detokenizers, other): logprob for other, logprob in entry.top} for entry in logprobs
        ],
        "text_offset": offsets,
    }


def _named(detokenizers: DetokenizerFactory, token: int, logprob: float) -> dict[str, Any]:
    raw = detokenizers.token_bytes(token)
    return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}


def _name(detokenizers: DetokenizerFactory, token: int) -> str:
    """A token's text; the bytes of one that is no text by itself, as OpenAI writes them ("bytes:\\xe2")."""
    raw = detokenizers.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
