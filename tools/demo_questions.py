"""Training conversations for the demo model: many ways to name a function, many ways to ask about it.

The phrasings are few, so what the model must learn is to find the name and to ignore the rest. Therefore many
questions have the name among words torn from the documentation, which no template could give.
"""

from __future__ import annotations

import importlib
import inspect
import random
import re
from collections.abc import Sequence

from tools.demo_functions import CLASSES, MODULES, Function
from tools.demo_text import CLOSERS, HELD_OUT_PHRASINGS, OPENERS, TRAINING_PHRASINGS, normal_form

Message = dict[str, str]

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You answer questions about Python's standard library.",
    "You are a Python expert. Be brief.",
)

_DOTTED_FORMS = ("{dotted}", "{dotted}", "{dotted}", "{dotted}()", "`{dotted}`", "`{dotted}()`", '"{dotted}"')
_SPLIT_FORMS = (
    "the {attribute} function of {owner}",
    "{attribute} from {owner}",
    "{attribute} in {owner}",
    "{owner}'s {attribute}",
    "the {owner} function {attribute}",
)


def docstring_corpus() -> list[str]:
    """Docstrings of the learned modules and all their public members: text for the tokenizer."""
    return sorted({doc for value in _documented() if (doc := inspect.getdoc(value))})


def _documented() -> list[object]:
    modules = [importlib.import_module(name) for name in MODULES]
    return [
        *modules,
        *(value for module in modules for name, value in vars(module).items() if name[0] != "_"),
    ]


class QuestionMaker:
    """Draws conversations from one random stream; the same seed gives the same conversations."""

    def __init__(self, functions: Sequence[Function], seed: int) -> None:
        self._functions = functions
        self._rng = random.Random(seed)
        self._words = re.findall(r"\b[A-Za-z]{1,12}\b[,.;:?!]?", " ".join(docstring_corpus()))
        self._held_out = frozenset(
            normal_form(phrasing.format(name=function.name))
            for phrasing in HELD_OUT_PHRASINGS
            for function in functions
        )

    def conversation(self, function: Function) -> list[Message]:
        """A chat that asks about `function`; at times with a system prompt or earlier turns about others."""
        messages: list[Message] = []
        if self._rng.random() < 0.15:
            messages.append({"role": "system", "content": self._rng.choice(SYSTEM_PROMPTS)})
        earlier = self._rng.choices((0, 1, 2), weights=(80, 14, 6))[0]
        for asked in [*self._rng.sample(self._functions, earlier), function]:
            messages.append({"role": "user", "content": self.question(asked)})
            messages.append({"role": "assistant", "content": asked.answer})
        return messages

    def question(self, function: Function) -> str:
        """One question. Raises ValueError when chance made a held-out one: the seed must change then."""
        if self._rng.random() < 0.35:
            text = f"{self._torn()} {self._written(function)} {self._torn()}".strip()
        else:
            text = self._phrased(function)
        if normal_form(text) in self._held_out:
            raise ValueError(f"the held-out question {text!r} came up in training; change the seed")
        return text

    def _phrased(self, function: Function) -> str:
        rng = self._rng
        phrasing = rng.choice(TRAINING_PHRASINGS)
        if rng.random() < 0.2:
            phrasing = phrasing.rstrip("?.")
        if rng.random() < 0.2:
            phrasing = f"{rng.choice((*OPENERS, self._torn()))} {phrasing}"
        if rng.random() < 0.2:
            phrasing = f"{phrasing} {rng.choice((*CLOSERS, self._torn()))}"
        if rng.random() < 0.15:
            phrasing = phrasing.lower()
        return phrasing.format(name=self._written(function))

    def _torn(self) -> str:
        """Up to ten words from anywhere in the documentation: in a row, or each from elsewhere."""
        rng = self._rng
        count = rng.randint(0, 10)
        if rng.random() < 0.5:
            return " ".join(rng.choices(self._words, k=count))
        start = rng.randrange(len(self._words) - count)
        return " ".join(self._words[start : start + count])

    def _written(self, function: Function) -> str:
        rng = self._rng
        if function.owner and rng.random() < 0.15:
            form = rng.choice(_SPLIT_FORMS)
            return form.format(attribute=function.attribute, owner=function.owner)
        dotted = function.name
        if function.owner in CLASSES and rng.random() < 0.2:
            dotted = ".".join(dotted.split(".")[-2:])
        return rng.choice(_DOTTED_FORMS).format(dotted=dotted)
