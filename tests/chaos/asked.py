"""What is asked in a chaos run, and how an answer is compared with that of an undisturbed run."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

KINDS = ("greedy", "seeded", "two choices", "logprobs", "stop string")
TOP_LOGPROBS = 2
_LOGPROB_TOLERANCE = 1e-3
_STOP_CHARACTERS = 3


@dataclass(frozen=True)
class Asked:
    """A request, as POSTed. All of them stream. `prompt` and `tokens` (output) are for the reference."""

    kind: str
    path: str
    prompt: tuple[int, ...]
    tokens: int
    sampling: Mapping[str, Any]
    stop: tuple[str, ...] = ()

    def body(self, salt: str) -> dict[str, Any]:
        """The request's body. `salt`: what was cached under another is not used."""
        sampling = {**self.sampling, **({"stop": list(self.stop)} if self.stop else {})}
        if self.path == "/generate":
            return {
                "input_ids": list(self.prompt), "stream": True, "cache_salt": salt,
                "sampling_params": {**sampling, "max_new_tokens": self.tokens},
            }  # fmt: skip
        logprobs = {"logprobs": TOP_LOGPROBS} if self.kind == "logprobs" else {}
        return {
            "model": "m", "prompt": list(self.prompt), "stream": True, "cache_salt": salt,
            "max_tokens": self.tokens, **sampling, **logprobs,
        }  # fmt: skip


@dataclass
class Choice:
    """What a client has of one choice. `tokens` where the API tells them."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    named: list[str] = field(default_factory=list)  # tokens as texts, with logprobs
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None


Answer = dict[int, Choice]


def draw(seed: int, count: int, prompt_tokens: tuple[int, int], tokens: int) -> list[Asked]:
    """Requests of all kinds, with prompts of a length within the bounds. Those with a stop string have none
    yet (see `with_stop`)."""
    rng = random.Random(seed)
    asked = []
    for i in range(count):
        kind = KINDS[i % len(KINDS)]
        prompt = tuple(rng.randrange(256) for _ in range(rng.randint(*prompt_tokens)))
        sampling: dict[str, Any] = {"ignore_eos": True, "temperature": 0.0}
        if kind in ("seeded", "two choices"):
            sampling.update(temperature=0.8, seed=rng.getrandbits(31))
        if kind == "two choices":
            sampling["n"] = 2
        path = "/v1/completions" if kind in ("seeded", "logprobs") else "/generate"
        asked.append(Asked(kind, path, prompt, tokens, sampling))
    return asked


def with_stop(asked: Asked, answer: Answer) -> Asked:
    """The request, ended by a string in the middle of its undisturbed answer."""
    text = answer[0].text
    middle = len(text) // 2
    return replace(asked, stop=(text[middle : middle + _STOP_CHARACTERS],))


def difference(asked: Asked, got: Answer, wanted: Answer) -> str | None:
    """What is wrong with a complete answer: "lost", "doubled", "wrong_token" or None."""
    if got.keys() != wanted.keys():
        return "lost"
    for index, right in wanted.items():
        mine = got[index]
        if (mine.text, mine.finish) == (right.text, right.finish) and mine.tokens == right.tokens:
            if mine.named != right.named or _differ(mine.logprobs, right.logprobs):
                return "wrong_token"
            continue
        if right.text.startswith(mine.text) and len(mine.text) < len(right.text):
            return "lost"
        longer = len(mine.text) > len(right.text) or len(mine.tokens) > len(right.tokens)
        return "doubled" if longer else "wrong_token"
    return None


def _differ(some: list[float], others: list[float]) -> bool:
    pairs = zip(some, others, strict=False)
    return len(some) != len(others) or any(abs(one - other) > _LOGPROB_TOLERANCE for one, other in pairs)
