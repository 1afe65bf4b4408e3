"""Traces with tenants for bench.tenancy, drawn from a seed: texts that many tenants ask about, and texts that
are one tenant's.

    system prompt ── document ── question      common, common, private: at least 30 tenants read each document
    system prompt ── turn ── answer ── turn    a conversation: private below the system prompt
    system prompt ── own document ── question  read several times by its tenant
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

PAGE_SIZE = 16
VOCABULARY = 32_000
ANSWER_TOKENS = 16
ANSWER_TOKEN = 7  # of every answer
LENGTH_S = 1800.0
FEWEST_READERS = 30  # tenants that use a common text
TENANTS = 60
_SYSTEM_PROMPTS, _SYSTEM_TOKENS = 4, 512
_DOCUMENTS, _DOCUMENT_TOKENS = 40, 1536
_READINGS = (1, 2)  # by one tenant, of one document
_CONVERSATIONS = 6  # of each tenant
_TURNS = (2, 5)
_TURN_TOKENS = (64, 384)
_OWN_DOCUMENTS, _OWN_READINGS = 3, (1, 4)
_OWN_TOKENS = (512, 1536)
_QUESTION_TOKENS = (16, 64)
_TIMES_IN_BURST = 10


@dataclass(frozen=True)
class TenantRequest:
    """A request of a tenant. The first `common` tokens of its prompt are in other tenants' prompts, too."""

    at_s: float
    tenant: str
    prompt: npt.NDArray[np.int32]
    common: int

    @cached_property
    def pages(self) -> tuple[bytes, ...]:
        """A name of each whole page of prompt and answer: equal where everything up to its end is."""
        tokens = np.concatenate([self.prompt, answer()])
        names, chain = list[bytes](), hashlib.blake2b(digest_size=8)
        for start in range(0, len(tokens) - PAGE_SIZE + 1, PAGE_SIZE):
            chain.update(tokens[start : start + PAGE_SIZE].tobytes())
            names.append(chain.digest())
        return tuple(names)


def answer() -> npt.NDArray[np.int32]:
    """What every prompt is answered with."""
    return np.full(ANSWER_TOKENS, ANSWER_TOKEN, np.int32)


class TenantTraces:
    """Draws traces. The same seed draws the same ones."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._fill = np.random.default_rng(seed)
        self._systems = [self._tokens(_SYSTEM_TOKENS) for _ in range(_SYSTEM_PROMPTS)]

    def usual(self) -> list[TenantRequest]:
        """Half an hour of about 3,000 requests."""
        made = self._documents()
        for number in range(TENANTS):
            made += self._conversations(f"tenant {number}") + self._own_documents(f"tenant {number}")
        return sorted(made, key=lambda one: one.at_s)

    def burst(self, usual: Sequence[TenantRequest], tenant: str, heavy: bool) -> list[TenantRequest]:
        """What a tenant sends besides `usual` so that in the middle third of the trace it sends ten times as
        much: requests like its usual ones whose private part is new, or, `heavy`, new documents only."""
        begin, end = LENGTH_S / 3, LENGTH_S * 2 / 3
        own = [one for one in usual if one.tenant == tenant]
        made = []
        for _ in range((_TIMES_IN_BURST - 1) * sum(begin <= one.at_s < end for one in own)):
            like, at = self._chance.choice(own), self._chance.uniform(begin, end)
            common, private = like.prompt[: like.common], self._tokens(len(like.prompt) - like.common)
            if heavy:
                common, private = self._systems[0], self._some(_OWN_TOKENS)
            made.append(self._request(at, tenant, common, private))
        return sorted(made, key=lambda one: one.at_s)

    # -- kinds of requests -------------------------------------------------------------------------

    def _documents(self) -> list[TenantRequest]:
        made = []
        for number in range(_DOCUMENTS):
            system = self._systems[number % len(self._systems)]
            text = np.concatenate([system, self._tokens(_DOCUMENT_TOKENS)])
            readers = self._chance.sample(range(TENANTS), self._chance.randint(FEWEST_READERS, TENANTS))
            for reader in readers:
                for _ in range(self._chance.randint(*_READINGS)):
                    at = self._chance.uniform(0, LENGTH_S)
                    made.append(self._request(at, f"tenant {reader}", text, self._some(_QUESTION_TOKENS)))
        return made

    def _conversations(self, tenant: str) -> list[TenantRequest]:
        made = []
        for _ in range(_CONVERSATIONS):
            at = self._chance.uniform(0, LENGTH_S)
            system = self._chance.choice(self._systems)
            said = self._some(_TURN_TOKENS)
            for _ in range(self._chance.randint(*_TURNS)):
                made.append(self._request(at, tenant, system, said))
                said = np.concatenate([said, answer(), self._some(_TURN_TOKENS)])
                at += self._chance.expovariate(1 / 30)
        return made

    def _own_documents(self, tenant: str) -> list[TenantRequest]:
        made = []
        for _ in range(_OWN_DOCUMENTS):
            at = self._chance.uniform(0, LENGTH_S)
            system = self._chance.choice(self._systems)
            document = self._some(_OWN_TOKENS)
            for _ in range(self._chance.randint(*_OWN_READINGS)):
                asked = np.concatenate([document, self._some(_QUESTION_TOKENS)])
                made.append(self._request(at, tenant, system, asked))
                at += self._chance.expovariate(1 / 30)
        return made

    def _request(
        self, at_s: float, tenant: str, common: npt.NDArray[np.int32], own: npt.NDArray[np.int32]
    ) -> TenantRequest:
        return TenantRequest(at_s, tenant, np.concatenate([common, own]), len(common))

    def _some(self, between: tuple[int, int]) -> npt.NDArray[np.int32]:
        return self._tokens(self._chance.randint(*between))

    def _tokens(self, count: int) -> npt.NDArray[np.int32]:
        return self._fill.integers(300, VOCABULARY, count, dtype=np.int32)


def overheard(usual: Sequence[TenantRequest], share: float, seed: int) -> list[TenantRequest]:
    """Requests for texts that one other tenant has asked just before: `share` of those that are private."""
    chance = random.Random(seed)
    private = [one for one in usual if one.common <= _SYSTEM_TOKENS]
    return [
        replace(one, tenant="stranger", at_s=one.at_s + 2.0)
        for one in chance.sample(private, int(share * len(private)))
    ]
