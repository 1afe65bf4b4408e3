"""Words shared by the demo model's training and by its check: phrasings, normal form, first sentence.

Standard library only: the check runs against a served model and must start without torch.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable

# A phrasing has one place, {name}: the function's qualified name, perhaps in another of NAME_FORMS.
TRAINING_PHRASINGS: tuple[str, ...] = (
    "What does {name} do?",
    "What is {name} for?",
    "Explain {name}.",
    "Tell me about {name}.",
    "How does {name} work?",
    "Describe {name} briefly.",
    "Can you explain what {name} does?",
    "When should I use {name}?",
    "{name}",
    "{name}?",
    "{name}: what is that?",
    "I need help with {name}.",
    "Give me the documentation of {name}.",
    "Show the docstring of {name}.",
    "What happens when I call {name}?",
    "What do I get from {name}?",
    "Why would anyone call {name}?",
    "In Python, what is the job of {name}?",
    "I do not understand {name}, what is it good for?",
    "My colleague keeps using {name}. What is it?",
    "While debugging I found a call to {name}. What does it do?",
    "Which problem does {name} solve?",
    "Summarise {name} for me.",
    "What will {name} return?",
    "Write one line about {name}.",
    "Do you know {name}?",
    "A test of mine fails in {name}; what should it do?",
    "The manual mentions {name}, but I cannot find the page. Explain, please.",
    "Someone told me to use {name} instead. Why?",
    "Let us talk about {name} now.",
    "Look up {name}.",
    "Say what {name} is meant to do.",
    "If I write {name} in a program, what happens then?",
    "There is {name} on line 12 of this file, and I have no idea why it is there.",
    "Before I use {name}, tell me shortly what it does.",
    "Help! {name} confuses me.",
)

# Never used in training: `check_held_out` is called before training and before every check.
HELD_OUT_PHRASINGS: tuple[str, ...] = (
    "I came across {name} while reading some code. How would you sum it up?",
    "In one sentence, which purpose does {name}() have in the standard library?",
    "Could you remind me of the behaviour of `{name}`, please?",
)

OPENERS: tuple[str, ...] = (
    "Hi!",
    "Hello,",
    "Please:",
    "Quick question:",
    "Hey,",
    "One more:",
    "I am new to Python.",
    "Thanks.",
)
CLOSERS: tuple[str, ...] = (
    "Thanks!",
    "Please.",
    "Thank you.",
    "Keep it short.",
    "I am curious.",
    "Just briefly.",
)

# Full stops of these do not end a sentence.
_ABBREVIATIONS = ("e.g.", "i.e.", "etc.", "vs.", "cf.", "Mr.", "approx.")


def one_line(text: str) -> str:
    """`text` with every run of white space made one space."""
    return " ".join(text.split())


def sentences(text: str) -> list[str]:
    """The sentences of `text`, one line each; a full stop ends one when a capital or the end follows."""
    line = one_line(text)
    found, start = [], 0
    for stop in re.finditer(r"[.!?](?=\s+[^a-z\s]|$)", line):
        if line[start : stop.end()].endswith(_ABBREVIATIONS):
            continue
        found.append(line[start : stop.end()].strip())
        start = stop.end()
    rest = line[start:].strip()
    return [*found, rest] if rest else found


def first_sentence(text: str) -> str:
    """What the check compares; empty for an empty text."""
    return next(iter(sentences(text)), "")


def normal_form(question: str) -> str:
    """A question without case and punctuation: two questions of one normal form are the same phrasing."""
    return " ".join(re.findall(r"[a-z0-9_{}]+", question.lower()))


def check_held_out(training: tuple[str, ...], held_out: tuple[str, ...]) -> None:
    """Raise ValueError when a held-out phrasing occurs in training, also as a part of one or around one."""
    known = {normal_form(phrasing): phrasing for phrasing in training if normal_form(phrasing) != "{name}"}
    for phrasing in held_out:
        mine = normal_form(phrasing)
        for form, other in known.items():
            if f" {form} " in f" {mine} " or f" {mine} " in f" {form} ":
                raise ValueError(f"the held-out phrasing {phrasing!r} occurs in training: {other!r}")


def draw_functions(names: Iterable[str], seed: int, count: int) -> list[str]:
    """`count` of `names`, the same for the same names (in any order) and seed."""
    return random.Random(seed).sample(sorted(names), count)
