"""The keys of stored pages and states.

    key    = visibility, 16 ASCII characters || digest, 32 bytes
    digest = BLAKE2b(page digest || owner, keyed with the group's space)
    space  = SHA-256 of the model's digest and of the group's layout

The page digest (wire/page_hash.py) names the tokens, and the space names what computed and laid out the
bytes: the model's files and what was done to them at load, the group's name, shape, dtype and tile order. So
a page of other weights under the same name of a model is a miss, and so is one of another layout. A state's
page digest is that of the page after which it holds.

The visibility comes first, readable, so that a tenant's pages can be forgotten by prefix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import msgspec

from wire.page_hash import PageDigest, owner_key
from wire.records import GroupLayout

VISIBILITY_BYTES = 16
_DIGEST_BYTES = 32
_PUBLIC = b"public".ljust(VISIBILITY_BYTES, b"-")


class StorageKeys:
    """Keys of one worker's groups."""

    def __init__(self, model_digest: bytes, layouts: Iterable[GroupLayout]) -> None:
        """`model_digest`: of the model's files and of how they were loaded (engine/model_digest.py)."""
        self._spaces = {layout.name: _space(model_digest, layout) for layout in layouts}

    def keys(self, group: str, digests: Sequence[PageDigest], tenant: str = "") -> list[bytes]:
        """The key of each page, or state, of a group. `tenant`: whose private copies they are; "": public."""
        space, prefix = self._spaces[group], visibility(tenant)
        owner = owner_key(tenant) if tenant else b""
        return [
            prefix + hashlib.blake2b(digest + owner, key=space, digest_size=_DIGEST_BYTES).digest()
            for digest in digests
        ]


def visibility(tenant: str) -> bytes:
    """How the keys of a tenant's private pages begin, or those of public ones."""
    return owner_key(tenant)[: VISIBILITY_BYTES // 2].hex().encode() if tenant else _PUBLIC


def key_text(key: bytes) -> str:
    """A key, or the name of a blob, for stores whose names are text: letters, digits and hyphens."""
    return key[:VISIBILITY_BYTES].decode("ascii") + key[VISIBILITY_BYTES:].hex()


def _space(model_digest: bytes, layout: GroupLayout) -> bytes:
    return hashlib.sha256(b"baton-storage-1" + model_digest + msgspec.msgpack.encode(layout)).digest()
