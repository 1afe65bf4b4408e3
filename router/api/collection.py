"""Collection: a whole answer, for clients that do not stream."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.streams.generation import ChoiceCounts
from router.text.token_starts import TokenStarts
from wire.request import FinishReason, OutputDelta, TokenLogprobs


@dataclass(slots=True)
class CollectedChoice:
    """Everything one choice has said."""

    texts: list[str] = field(default_factory=list)
    starts: TokenStarts = field(default_factory=TokenStarts)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # empty unless asked for
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the prompt's tokens after the first
    pooled: bytes | None = None  # the prompt's vector (wire/request.py: TokenRun)
    finish: FinishReason | None = None
    matched: str | int | None = None

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.texts)


class Collection:
    """Everything every choice has said. Implements Answer."""

    unread = 0

    def __init__(self, choices: int) -> None:
        self.choices = [CollectedChoice() for _ in range(choices)]

    def add(self, choice: ChoiceCounts, text: str, delta: OutputDelta) -> None:
        """Add to a choice."""
        collected = self.choices[choice.index]
        collected.texts.append(text)
        collected.starts.add(text, delta)
        collected.tokens += delta.tokens
        collected.logprobs += delta.logprobs or ()
        if delta.prompt_logprobs is not None:
            collected.prompt_logprobs = delta.prompt_logprobs
        collected.pooled = delta.pooled or collected.pooled
        collected.finish, collected.matched = delta.finish, delta.matched

    def logprobs(self) -> int:
        """How many log-probabilities there are, about: of the tokens, and of the alternatives of each."""
        named = (entries for one in self.choices for entries in (one.logprobs, one.prompt_logprobs))
        return sum(len(entries) * (1 + len(entries[0].top)) for entries in named if entries)
