"""The page hash chain: whole pages only, namespaces apart, divisible anywhere."""

from __future__ import annotations

import hashlib
import hmac

import pytest

from wire.codec import pack_tokens
from wire.page_hash import (
    event_hash,
    event_hashes,
    namespace_seed,
    owned_digests,
    page_digests,
    tenant_key,
    tenant_of_key,
)

SEED = namespace_seed("model")


def test_each_digest_is_sha256_of_the_previous_and_the_tokens() -> None:
    tokens = pack_tokens(range(8))
    first = hashlib.sha256(SEED + tokens[:16]).digest()
    second = hashlib.sha256(first + tokens[16:]).digest()
    assert page_digests(SEED, tokens, 4) == [first, second]


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_a_chain_can_be_continued_at_any_page(page_size: int) -> None:
    tokens = pack_tokens(range(50))
    whole = page_digests(SEED, tokens, page_size)
    assert len(whole) == 50 // page_size
    cut = len(whole) // 2
    head = page_digests(SEED, tokens[: cut * page_size * 4], page_size)
    tail = page_digests(head[-1] if head else SEED, tokens[cut * page_size * 4 :], page_size)
    assert head + tail == whole


def test_namespaces_never_share_a_digest() -> None:
    seeds = {
        namespace_seed("m"),
        namespace_seed("m", "lora"),
        namespace_seed("m", "", "lora"),
        namespace_seed("m", "lo", "ra"),
        namespace_seed("m", "lora", "", True),
        namespace_seed("ml", "ora"),
    }
    assert len(seeds) == 6


def test_bigram_pages_overlap_by_one_raw_token() -> None:
    tokens = pack_tokens(range(9))
    digests = page_digests(SEED, tokens, 4, is_bigram=True)
    pairs = b"".join(tokens[i * 4 : i * 4 + 8] for i in range(4))
    assert digests[0] == hashlib.sha256(SEED + pairs).digest()
    assert len(digests) == 2
    assert len(page_digests(SEED, tokens[:-4], 4, is_bigram=True)) == 1


def test_event_hash_is_signed_64_bit() -> None:
    assert event_hash(b"\xff" * 32) == -1
    assert event_hash(b"\x00" * 7 + b"\x05" + b"\x00" * 24) == 5


def test_a_tenants_copies_have_names_of_their_own_and_without_a_tenant_nothing_changes() -> None:
    digests = page_digests(SEED, pack_tokens(range(16)), 4)
    assert owned_digests(digests, "") is digests
    key = hashlib.sha256(b"baton-owner-1" + "ß".encode()).digest()
    assert owned_digests(digests, "ß") == [
        hashlib.blake2b(d, key=key, digest_size=32).digest() for d in digests
    ]
    for secret in (b"one", b"two"):
        derived = hmac.digest(secret, b"baton event names 1" + "ß".encode(), "sha256")
        assert owned_digests(digests, "ß", secret) == [
            hashlib.blake2b(d, key=derived, digest_size=32).digest() for d in digests
        ]
        assert owned_digests(digests, "", secret) is digests
    names = {name for tenant in ("", "a", "b", "ß") for name in event_hashes(owned_digests(digests, tenant))}
    assert len(names) == 4 * len(digests)


def test_the_keys_of_tenants_and_generations_differ() -> None:
    names = ["a", "b", "a\0", "a\x000", "a\x001", "\0", "ß", "a\0b"]
    made = {tenant_key(name, generation): (name, generation) for name in names for generation in (0, 1, 10)}
    assert len(made) == 3 * len(names)
    assert {key: tenant_of_key(key) for key in made} == made
    assert tenant_key("a") == "a"
    assert tenant_key("", 3) == ""
    assert tenant_of_key("a\0٣") == ("a\0٣", 0), "what no tenant_key has made is a name"
