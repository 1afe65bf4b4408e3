"""PublicPrefixes: the beginnings of prompts that the operator says are public, as tokens of one model.

A system prompt is what the chat template makes of it, up to where the tokens depend on the message that
follows: a chat with it is rendered with several messages, and what all of them begin with counts. A prompt
that agrees with a part of a prefix has that part of it: a chat with tools, say, in whose template the tools
follow the system prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date

from common.errors import BatonError, ConfigError
from router.options import PublicPrefix
from router.text.chat import Chat
from router.text.tokenization import Tokenization
from wire.request import NO_MARKS, PromptMarks

_FOLLOW = ("Hello", "a1", "0", " x", "\nx", "\u00e9t\u00e9", "\u4f60\u597d", "!?", "{", "<", "#")
"""Messages of different kinds of characters: what they have in common with another is the prefix."""


class PublicPrefixes:
    """One model's. Templates may write the date, so the tokens are made anew when it changes."""

    def __init__(self, tokenization: Tokenization, listed: Sequence[PublicPrefix]) -> None:
        """Raises ConfigError for a file that cannot be read, and for what the chat template refuses."""
        self._tokenization = tokenization
        self._texts = [(one.form, one.read()) for one in listed]
        self._is_dated = "strftime_now" in tokenization.templates
        self._day = date.today()
        self.tokens = self._tokenise()

    def marks(self, prompt: list[int], private_from: int | None) -> PromptMarks:
        """What workers are told of a prompt. `private_from`: the page from which on it is private."""
        if self._is_dated and self._texts and date.today() != self._day:
            self._day = date.today()
            self.tokens = self._tokenise()
        public = whole = 0
        for tokens in self.tokens:
            agrees = common_length(tokens, prompt)
            public = max(public, agrees)
            whole = max(whole, agrees if agrees == len(tokens) else 0)
        if not public and private_from is None:
            return NO_MARKS
        return PromptMarks(public, whole, private_from)

    def _tokenise(self) -> list[list[int]]:
        prefixes = []
        for number, (form, text) in enumerate(self._texts):
            try:
                prompts = [self._prompt(form, text, follows) for follows in _FOLLOW]
            except BatonError as error:
                remedy = "give form: prompt, or another text" if form == "system" else "give another text"
                raise ConfigError(f"public_prefixes.{number}", str(error), remedy) from None
            first, *others = prompts
            prefixes.append(first[: min(common_length(first, one) for one in others)])
        return prefixes

    def _prompt(self, form: str, text: str, follows: str) -> list[int]:
        if form == "prompt":
            return self._tokenization.encode(text + follows)
        messages = [{"role": "system", "content": text}, {"role": "user", "content": follows}]
        return self._tokenization.encode_chat(Chat(messages))


def common_length(one: list[int], other: list[int]) -> int:
    """How many tokens two lists begin with alike. Slices are compared, which takes no time per token here."""
    low, high = 0, min(len(one), len(other))
    if one[:1] != other[:1]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
