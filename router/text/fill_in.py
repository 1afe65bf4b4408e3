"""Text between a prompt and a suffix: how models of code are asked for it.

Such a model was trained on texts whose middle was moved to their end, with tokens of its own before each part
(Bavarian et al., Efficient Training of Language Models to Fill in the Middle, 2022). Which tokens a model has
says which form it reads.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple


class FillInForm(NamedTuple):
    """The tokens before the prompt, before the suffix, and at the end, behind which the middle comes."""

    prefix: str
    suffix: str
    middle: str
    suffix_comes_first: bool = False

    @property
    def tokens(self) -> tuple[str, ...]:
        """All that a model must have to read this form."""
        return tuple(token for token in self[:3] if token)

    def prompt(self, prefix: str, suffix: str) -> str:
        """The text behind which a model writes what stands between the two."""
        before, behind = self.prefix + prefix, self.suffix + suffix
        return (behind + before if self.suffix_comes_first else before + behind) + self.middle


FILL_IN_FORMS = (
    FillInForm("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, Granite from 3 on
    FillInForm("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite before
    FillInForm("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    FillInForm("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    FillInForm("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", True),  # Seed
    FillInForm("[PREFIX]", "[SUFFIX]", "", True),  # Codestral
)


def fill_in_form(tokens: Container[str]) -> FillInForm | None:
    """The form that a model with these added tokens reads; None: it has none of them."""
    return next((form for form in FILL_IN_FORMS if all(token in tokens for token in form.tokens)), None)
