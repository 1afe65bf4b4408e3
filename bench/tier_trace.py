"""The prompts of bench.tier_curves, drawn from a seed: conversations, documents that are read several times,
and prompts that never come again."""

from __future__ import annotations

import random
from dataclasses import dataclass

VOCABULARY = 32_000
LONGEST = 2048  # tokens of a conversation, the last answer included
_SYSTEM_TOKENS = 32
_DOCUMENT_TOKENS = 384
_CONVERSATIONS = 24
_DOCUMENTS = 12
_SINGLE = 40
_TURNS = (2, 6)
_READINGS = (2, 6)


@dataclass(frozen=True)
class Turn:
    """The next prompt of a session: its last prompt, the answer to that, and `adds`."""

    session: int
    adds: list[int]


def draw_tokens(chance: random.Random, count: int) -> list[int]:
    """Random token ids."""
    return [chance.randrange(300, VOCABULARY) for _ in range(count)]


def draw_trace(seed: int) -> list[Turn]:
    """About 170 turns of all kinds, mixed as if sessions began at random times."""
    chance = random.Random(seed)
    system, timed = draw_tokens(chance, _SYSTEM_TOKENS), list[tuple[float, Turn]]()
    session = 0
    for _ in range(_CONVERSATIONS):
        session, at = session + 1, chance.random()
        for turn in range(chance.randint(*_TURNS)):
            adds = draw_tokens(chance, chance.randint(48, 128))
            timed.append((at, Turn(session, adds if turn else system + adds)))
            at += chance.expovariate(1 / 0.1)
    for _ in range(_DOCUMENTS):
        document, at = draw_tokens(chance, _DOCUMENT_TOKENS), chance.random()
        for _ in range(chance.randint(*_READINGS)):
            session += 1
            timed.append((at, Turn(session, document + draw_tokens(chance, 24))))
            at += chance.expovariate(1 / 0.15)
    for _ in range(_SINGLE):
        session += 1
        timed.append((chance.random(), Turn(session, system + draw_tokens(chance, chance.randint(128, 384)))))
    return [turn for _, turn in sorted(timed, key=lambda one: one[0])]
