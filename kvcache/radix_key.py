"""RadixKey: tokens in a namespace, on behalf of a tenant; the key of a prefix."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from wire.page_hash import PageDigest, namespace_seed, owner_key
from wire.request import NO_MARKS, NOBODY, PromptMarks

OWNER_BYTES = 32
"""Of a tenant in the slot of a private child of a public node; the rest is the public child's slot."""


@dataclass(frozen=True)
class Namespace:
    """What must be equal for KV to be shared: model, extra key (LoRA, images), cache salt, kind of cache."""

    model: str
    extra_key: str = ""
    cache_salt: str = ""
    is_bigram: bool = False

    @cached_property
    def seed(self) -> PageDigest:
        """Start of the hash chain; two namespaces are equal exactly when their seeds are."""
        return namespace_seed(self.model, self.extra_key, self.cache_salt, self.is_bigram)


class RadixKey:
    """Tokens (int32, shared, not copied) of one namespace. Slices are views.

    In a bigram namespace a unit is a pair of neighbouring tokens: the length is one less than the tokens, and
    slices share the token at their border. Keys of different tenants match nothing of each other's but what
    is public.
    """

    __slots__ = ("marks", "namespace", "tenant", "tokens")

    def __init__(
        self, tokens: npt.ArrayLike, namespace: Namespace, tenant: str = "", marks: PromptMarks = NO_MARKS
    ) -> None:
        """`marks` are those of the prompt of which these tokens are the beginning; see tenancy/marks.py."""
        self.tokens: npt.NDArray[np.int32] = np.ascontiguousarray(tokens, dtype=np.int32)
        self.namespace = namespace
        self.tenant = tenant
        self.marks = marks

    def __len__(self) -> int:
        n = len(self.tokens)
        return max(0, n - 1) if self.namespace.is_bigram else n

    def __getitem__(self, part: slice) -> RadixKey:
        """A contiguous part, in units. Marks stay with a beginning."""
        start, stop, step = part.indices(len(self))
        assert step == 1, "a key is sliced without gaps"
        end = stop + 1 if self.namespace.is_bigram and stop > start else stop
        marks = NO_MARKS if start else self.marks
        return RadixKey(self.tokens[start:end], self.namespace, self.tenant, marks)

    # -- marks, in whole pages -----------------------------------------------------------------------

    def public_pages(self, page_size: int) -> int:
        """So many pages at the beginning are everybody's, whoever computes them."""
        before = self.marks.private_from if self.tenant.startswith(NOBODY) else None
        return max(self._pages(self.marks.public, page_size), before or 0)

    def whole_pages(self, page_size: int) -> int:
        """Pages of the longest prefix of the operator's with which the prompt begins as a whole."""
        return self._pages(self.marks.whole, page_size)

    def private_page(self, page_size: int) -> int:
        """The page from which on the key is private for ever; beyond its end if it is not."""
        private_from = self.marks.private_from
        if private_from is None:
            return len(self.tokens) + 1
        return max(private_from, self._pages(self.marks.public, page_size))

    def _pages(self, tokens: int, page_size: int) -> int:
        """Whole pages of the first `tokens` tokens."""
        return max(0, tokens - (1 if self.namespace.is_bigram else 0)) // page_size

    def everybodys(self) -> RadixKey:
        """The same tokens on behalf of nobody."""
        return RadixKey(self.tokens, self.namespace)


def root_slot(namespace: Namespace, tenant: str, first_page: bytes) -> bytes:
    """Where the root has the prefix that begins with `first_page`: tenants and namespaces meet nowhere."""
    shared = namespace.seed + first_page
    return owner_key(tenant) + shared if tenant else shared
