"""What an answer tells beside its text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shown:
    """Wishes of a request."""

    logprobs: bool = False
    usage: bool = False  # a stream ends with it
    running_usage: bool = False  # each event of a stream has it
    token_ids: bool = False  # of prompt and output
    prompt_logprobs: int | None = None  # a list of its own, in vLLM's form, with so many of the best tokens
    ids_as_names: bool = False  # log-probabilities name a token "token_id:5"
    named_tokens: bool = False  # log-probabilities are of tokens that the request names

    @property
    def form(self) -> str:
        """What makes the events of one stream differ from another's, as part of a name."""
        wishes = {
            "+usage": self.usage,
            "+running": self.running_usage,
            "+ids": self.token_ids,
            "+names": self.ids_as_names,
            "+named": self.named_tokens,
        }
        return "".join(name for name, wished in wishes.items() if wished)
