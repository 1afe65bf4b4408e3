"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.text.detokenize import Detokenizer, DetokenizerFactory
from wire.request import TokenLogprobs


class TokenNames:
    """How log-probabilities name tokens."""

    def __init__(self, detokenizers: DetokenizerFactory, as_ids: bool, with_chosen: bool = False) -> None:
        """`as_ids`: "token_id:5", as vLLM's return_tokens_as_token_ids; else by the token's text.
        `with_chosen`: the chosen token is among the others of a chat, as vLLM has it where a request names
        them."""
        self.bytes_of = detokenizers.token_bytes
        self.as_ids = as_ids
        self._with_chosen = with_chosen

    def beside(self, token: int, entry: TokenLogprobs) -> list[dict[str, Any]]:
        """The other tokens at a place of a chat."""
        others = dict(entry.top)
        if self._with_chosen:
            others.setdefault(token, entry.logprob)
        return [self.of_chat(other, logprob) for other, logprob in others.items()]

    def of_chat(self, token: int, logprob: float) -> dict[str, Any]:
        """An entry of a chat's log-probabilities."""
        raw = self.bytes_of(token)
        name = f"token_id:{token}" if self.as_ids else raw.decode("utf-8", "replace")
        return {"token": name, "logprob": logprob, "bytes": list(raw)}

    def of_completion(self, token: int) -> str:
        """A token's text; the bytes of one that is no text by itself, as OpenAI writes: "bytes:\\xe2"."""
        if self.as_ids:
            return f"token_id:{token}"
        raw = self.bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(names: TokenNames, tokens: list[int], logprobs: list[TokenLogprobs]) -> dict[str, Any]:
    """For chat: one entry per token with its bytes and alternatives."""
    return {
        "content": [
            {
                **names.of_chat(token, entry.logprob),
                "top_logprobs": names.beside(token, entry),
            }
            for token, entry in zip(tokens, logprobs, strict=True)
        ],
        "refusal": None,
    }


class TextOffsets:
    """Where in the text of a choice each token begins: the characters that the tokens before it complete. A
    stream's text may lag behind its tokens, because its end may be the beginning of a stop string."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._length = 0  # characters

    def of(self, tokens: list[int]) -> list[int]:
        """Those of the next tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self._length)
            self._length += len(self._detokenizer.push(token))
        return offsets


def completion_logprobs(
    names: TokenNames, tokens: list[int], logprobs: Sequence[TokenLogprobs | None], offsets: TextOffsets
) -> dict[str, Any]:
    """For completions: parallel lists. The first token of a prompt has no log-probability. Each other one is
    among the best at its place, as OpenAI has it: a dictionary may have one more than was asked for."""
    return {
        "tokens": [names.of_completion(token) for token in tokens],
        "token_logprobs": [None if entry is None else entry.logprob for entry in logprobs],
        "top_logprobs": [
            None if entry is None else _best(names, token, entry)
            for token, entry in zip(tokens, logprobs, strict=True)
        ],
        "text_offset": offsets.of(tokens),
    }


def _best(names: TokenNames, token: int, entry: TokenLogprobs) -> dict[str, float]:
    """By name, the best first; of several tokens of one text the best."""
    best: dict[str, float] = {}
    for other, logprob in (*entry.top, (token, entry.logprob)):
        best.setdefault(names.of_completion(other), logprob)
    return best


def prompt_logprobs(
    names: TokenNames, prompt: list[int], scores: list[TokenLogprobs]
) -> list[dict[str, Any] | None]:
    """vLLM's prompt_logprobs: for each token of a prompt itself and the best, by id; none for the first.

    A token that is not among the best has no rank here.
    """
    told: list[dict[str, Any] | None] = [None]
    for token, entry in zip(prompt[1:], scores, strict=True):
        ranked: dict[int, tuple[float, int | None]] = {
            other: (logprob, rank) for rank, (other, logprob) in enumerate(entry.top, 1)
        }
        ranked.setdefault(token, (entry.logprob, None))
        told.append({str(other): _ranked(names, other, *found) for other, found in ranked.items()})
    return told


def _ranked(names: TokenNames, token: int, logprob: float, rank: int | None) -> dict[str, Any]:
    text = names.bytes_of(token).decode("utf-8", "replace")
    return {"logprob": logprob, "rank": rank, "decoded_token": text}
