"""The page hash: a SHA-256 chain over tokens, seeded by the namespace.

    digest(page) = SHA-256(digest(previous page) || tokens of the page, int32 little-endian)
    digest(no page) = SHA-256 of the namespace (model, extra_key, cache salt, is_bigram)

It names pages of tokens, whatever groups store for them, so router, tree and tiers agree on it. Because the
chain starts with the namespace, pages of different salts or LoRA ids differ in every tier.

The tenant is not in the chain. In KV events and in the index a tenant's copy of a page has a name of its own:
the digest under a key that only members of the cluster can derive (`owned_digests`, docs/decisions/0061).
What is derived from a tenant here is derived from its key string (`tenant_key`): its name, and its generation
once it was forgotten (docs/decisions/0059-forgetting.md).
"""

from __future__ import annotations

import hashlib
import hmac
from functools import lru_cache

import numpy as np

PageDigest = bytes  # 32 bytes

_EVENT_KEY = b"baton event names 1"


def namespace_seed(
    model: str, extra_key: str = "", cache_salt: str = "", is_bigram: bool = False
) -> PageDigest:
    """The digest before the first page. Length prefixes keep ("ab", "c") and ("a", "bc") apart."""
    chain = hashlib.sha256(b"baton-kv-1")
    for part in (model, extra_key, cache_salt):
        raw = part.encode()
        chain.update(len(raw).to_bytes(4, "little") + raw)
    chain.update(b"\x01" if is_bigram else b"\x00")
    return chain.digest()


def page_digests(
    seed: PageDigest, tokens: bytes | memoryview, page_size: int, is_bigram: bool = False
) -> list[PageDigest]:
    """Digests of the whole pages of `tokens` (int32 little-endian), continuing the chain from `seed`.

    A bigram page covers page_size + 1 raw tokens and hashes both of each pair; its pages overlap by one
    raw token, so `tokens` holds pages * page_size + 1 of them.
    """
    view = memoryview(tokens).cast("B")
    stride = page_size * 4
    usable = len(view) - 4 if is_bigram else len(view)
    digest = seed
    digests = []
    for start in range(0, usable - stride + 1, stride):
        if is_bigram:
            chain = hashlib.sha256(digest)
            for offset in range(start, start + stride, 4):
                chain.update(view[offset : offset + 8])
            digest = chain.digest()
        else:
            digest = hashlib.sha256(digest + view[start : start + stride]).digest()
        digests.append(digest)
    return digests


_GENERATION = "\0"  # between a tenant's name and its generation


def tenant_key(name: str, generation: int = 0) -> str:
    """The key string of a tenant: what trees, tiers, events and storage know it by. Those of two generations
    differ, so that nothing of the older one is found under the newer one. Generation 0 of a name is the name
    itself; without a tenant the key string is "" in every generation."""
    if not name or (not generation and _GENERATION not in name):
        return name
    return f"{name}{_GENERATION}{generation}"


def tenant_of_key(key: str) -> tuple[str, int]:
    """The name and the generation that `tenant_key` has made a key string of."""
    name, mark, generation = key.rpartition(_GENERATION)
    if not mark or not (generation.isascii() and generation.isdigit()):
        return key, 0
    return name, int(generation)


@lru_cache(4096)
def owner_key(tenant: str) -> bytes:
    """32 bytes that stand for a tenant, given by its key string. Who knows that knows them."""
    return hashlib.sha256(b"baton-owner-1" + tenant.encode()).digest()


@lru_cache(4096)
def event_key(tenant: str, secret: bytes) -> bytes:
    """The key (32 bytes) of a tenant's pages in KV events. `secret`: the cluster's, without which nobody can
    derive it; b"" in a cluster that has none: then it is `owner_key`."""
    return hmac.digest(secret, _EVENT_KEY + tenant.encode(), "sha256") if secret else owner_key(tenant)


def owned_digests(digests: list[PageDigest], tenant: str, secret: bytes = b"") -> list[PageDigest]:
    """What names a tenant's copies of these pages in KV events and in the index: the keyed BLAKE2b of each
    digest. Without a tenant they are the digests themselves. `secret`: see `event_key`.

    HMAC-SHA256 was rejected: it takes 2.1 us a page, and BLAKE2b, whose key is a part of it, 0.6 us.
    """
    if not tenant:
        return digests
    key = event_key(tenant, secret)
    return [hashlib.blake2b(digest, key=key, digest_size=32).digest() for digest in digests]


def event_hash(digest: PageDigest) -> int:
    """The page's name in KV events: the first 8 bytes, big-endian, signed (the form SGLang publishes)."""
    return int.from_bytes(digest[:8], "big", signed=True)


def event_hashes(digests: list[PageDigest]) -> list[int]:
    """`event_hash` of each digest, with one conversion for all of them."""
    names: list[int] = np.frombuffer(b"".join(digests), ">i8")[::4].tolist()
    return names
