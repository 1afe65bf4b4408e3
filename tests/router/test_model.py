"""Model: what it gives to the parts of the text side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from router.model import Model
from router.text.output_formats import OutputFormats
from router.text.reasoning import ReasoningStart
from router.text.tokenization import Tokenization


def test_the_end_of_a_prompt_reaches_behind_a_long_text_that_goes_on(model: Path) -> None:
    tokenization = Tokenization(model)
    unused: Any = None
    formats = OutputFormats("", {}, (), "none", "deepseek_r1")
    one = Model("tiny", tokenization, unused, unused, unused, unused, formats, unused, unused)
    for continued in ("The answer ", "The answer of all answers, é " * 20):
        prompt = tokenization.encode(f"assistant\n</think>{continued}")
        parsing = one.parsing(prompt, None, with_reasoning=True, shows_special=False, continued=continued)
        assert parsing is not None
        assert parsing.start is ReasoningStart.NEVER
