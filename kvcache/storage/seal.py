"""The seal of a stored blob: what proves that its bytes are those that were stored under its key.

    derived        = BLAKE2b-512(key, keyed with the secret's key)
    name in store  = visibility of the key || derived[:32]
    seal           = nonce, 12 bytes || AES-256-GMAC(derived[32:], nonce, page), 16 bytes || mark, 4 bytes

A blob of another key, of another secret, cut short or with any bit changed has another tag. The name depends
on the secret as well: after a rotation all old blobs have other names, so they are missing, not bad; and who
can list a store cannot test which prompts lie in it. Each key has its own MAC key, so random nonces do not
repeat under one. Measured against others in docs/decisions/0053-sealed-pages.md.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import NamedTuple

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvcache.storage.keys import VISIBILITY_BYTES

_NONCE_BYTES = 12
_TAG_BYTES = 16
_MARK = b"BTN1"
SEAL_BYTES = _NONCE_BYTES + _TAG_BYTES + len(_MARK)
_USE = b"baton storage 1"


class Sealed(NamedTuple):
    """Where the blob of one key lies, and the key of its tag."""

    name: bytes
    tag_key: bytes


class Sealer:
    """Seals and checks the blobs of one secret."""

    def __init__(self, secret: bytes) -> None:
        self._key = hmac.digest(secret, _USE, "sha256")

    def locate(self, key: bytes) -> Sealed:
        """Of one key of storage/keys.py."""
        derived = hashlib.blake2b(key, key=self._key).digest()
        return Sealed(key[:VISIBILITY_BYTES] + derived[:32], derived[32:])


def write_seal(place: Sealed, page: memoryview, seal: memoryview) -> None:
    """Write the seal of `page`. The GIL is released meanwhile."""
    nonce = os.urandom(_NONCE_BYTES)
    seal[:_NONCE_BYTES] = nonce
    seal[_NONCE_BYTES:-4] = AESGCM(place.tag_key).encrypt(nonce, b"", page)
    seal[-4:] = _MARK


def seal_holds(place: Sealed, page: memoryview, seal: memoryview) -> bool:
    """Whether `page` is what was sealed under this key. The GIL is released meanwhile."""
    if seal[-4:] != _MARK:
        return False
    tag = AESGCM(place.tag_key).encrypt(bytes(seal[:_NONCE_BYTES]), b"", page)
    return hmac.compare_digest(tag, bytes(seal[_NONCE_BYTES:-4]))
