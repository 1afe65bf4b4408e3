"""RoomRequests: a submission as the requests of its rooms."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from common.secrets import ClusterSecret, secret_in_use
from router.index.global_index import digest_hashes
from router.placement.placer import Placer
from router.placement.policy import PlacementRequest
from router.streams.generation import Submission
from wire.codec import pack_tokens
from wire.page_hash import namespace_seed, owned_digests, page_digests, tenant_key
from wire.request import NO_MARKS, GenerateRequest, PromptMarks, page_owner


class RoomNumbers:
    """Numbers the rooms of a router."""

    def __init__(self) -> None:
        self._next_room = (secrets.randbits(31) << 32) + 1  # workers have rooms of several routers

    def take(self, count: int) -> int:
        """The first of `count` consecutive room numbers that no other request has."""
        first = self._next_room
        self._next_room += count
        return first


class RoomRequests:
    """Hashes the prompts of one model."""

    def __init__(
        self,
        model: str,
        secret: ClusterSecret | None = None,
        generation: Callable[[str], int] = lambda _tenant: 0,
    ) -> None:
        """`secret`: the cluster's, from which the names of tenants' pages are derived. `generation` is that
        of a tenant now (wire/page_hash.py)."""
        self._model = model
        self._secret = secret
        self._generation = generation
        self._seed = namespace_seed(model)  # of most requests

    def make(self, submission: Submission, placer: Placer) -> list[tuple[GenerateRequest, PlacementRequest]]:
        """What workers and the policy are told of each choice, in the order of choices. `placer` is that of
        the request's version."""
        s, page_tokens = submission, placer.page_tokens
        seed = self._seed
        if s.extra_key or s.cache_salt:
            seed = namespace_seed(self._model, s.extra_key, s.cache_salt)
        generation = self._generation(s.tenant)
        known_by = tenant_key(s.tenant, generation)
        output_tokens = placer.output_tokens(s.sampling.max_new_tokens)
        requests: list[tuple[GenerateRequest, PlacementRequest]] = []
        for prompt, marks in zip(s.prompts, s.marks or [NO_MARKS] * len(s.prompts), strict=True):
            packed = pack_tokens(prompt)
            digests = page_digests(seed, packed, page_tokens) if page_tokens else []
            owner = page_owner(known_by, marks, s.first_room + len(requests))
            named = _public_pages(marks, s.tenant, page_tokens)
            private = owned_digests(digests[named:], owner, secret_in_use(self._secret))
            hashes = digest_hashes(digests[:named] + private)
            # What is told of a prompt leaves with the first token: one worker computes both.
            alone = s.sampling.prompt_logprobs is not None or s.sampling.pooling is not None
            public = digest_hashes(digests) if owner else None
            to_place = PlacementRequest(
                len(prompt), hashes, output_tokens, s.session, s.tenant, s.priority, alone, public
            )
            for choice in range(s.n):
                request = GenerateRequest(
                    request_id=s.request_id, sampling=s.sampling, extra_key=s.extra_key,
                    cache_salt=s.cache_salt, tenant=s.tenant, priority=s.priority,
                    room=s.first_room + len(requests), epoch=0, prompt=packed, choice=choice,
                    arrived_ns=s.arrived_ns, tenant_generation=generation, marks=marks,
                )  # fmt: skip
                requests.append((request, to_place))
        return requests


def _public_pages(marks: PromptMarks, tenant: str, page_tokens: int) -> int:
    """Pages that are everybody's whoever computes them: what the operator has named, and of a prompt without
    a tenant what comes before its mark. (As kvcache/radix_key.py says it to workers.)"""
    named = marks.public // page_tokens if page_tokens else 0
    return named if tenant else max(named, marks.private_from or 0)
