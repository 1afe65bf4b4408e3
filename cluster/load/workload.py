"""What `baton bench` sends: prompts of random words, or those of a file; and when."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError

_WORDS = (
    "the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not",
    "he", "his", "but", "at", "are", "this", "have", "from", "or", "had", "an", "they", "which", "one", "you",
    "were",
)  # fmt: skip
"""About one token each in most vocabularies. The length that counts is the one that the server tells."""


@dataclass(frozen=True)
class Workload:
    """Prompts, and how many tokens each asks for."""

    prompts: tuple[str, ...]
    output_tokens: int


def random_workload(
    count: int, input_words: int, shared_words: int, output_tokens: int, seed: int
) -> Workload:
    """`count` prompts of `input_words` words, of which the first `shared_words` are the same in all."""
    if shared_words > input_words:
        raise ConfigError(
            "--prefix-len", f"{shared_words} is longer than --input-len {input_words}", "give less"
        )
    draw = random.Random(seed)  # noqa: S311 (no secret)
    shared = draw.choices(_WORDS, k=shared_words)
    rest = input_words - shared_words
    return Workload(
        tuple(" ".join([*shared, *draw.choices(_WORDS, k=rest)]) for _ in range(count)), output_tokens
    )


def read_workload(path: Path, count: int, output_tokens: int) -> Workload:
    """`count` prompts of a file, again from its start if it has less: JSON lines with a `prompt`, or plain
    lines. Raises ConfigError."""
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--prompts", f"cannot read {path}: {error}", "give a readable file") from None
    if not lines:
        raise ConfigError("--prompts", f"{path} has no line", "give a file with prompts")
    prompts = [_prompt(path, number, line) for number, line in enumerate(lines, 1)]
    return Workload(tuple(prompts[i % len(prompts)] for i in range(count)), output_tokens)


def arrivals(count: int, per_s: float, seed: int) -> Iterator[float]:
    """Seconds from the start at which requests arrive: a Poisson process."""
    draw, at = random.Random(seed), 0.0  # noqa: S311 (no secret)
    for _ in range(count):
        yield at
        at += draw.expovariate(per_s)


def _prompt(path: Path, number: int, line: str) -> str:
    if not line.lstrip().startswith("{"):
        return line
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError):
        prompt = None
    if not isinstance(prompt, str):
        raise ConfigError("--prompts", f"line {number} of {path} has no text `prompt`", "correct it")
    return prompt
