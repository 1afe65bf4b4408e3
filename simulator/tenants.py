"""PageNames: which pages of a prompt its tenant shares with others, in a simulation.

A tenant's pages have names of its own, so that no worker's memory and no index finds them for anybody else.
When enough tenants have asked for a page whose parent is public, it becomes public at the end of an epoch:
from then on its name is the same for all. "Enough" is drawn from [K, 2K) for each place, as by the product
(kvcache/tenancy/promotion.py).

Two things are simpler than in the product. Pages become public on all workers at a time; and no copy takes
the public name, so that each worker computes such a page once more.
"""

from __future__ import annotations

from collections import defaultdict
from hashlib import blake2b

import numpy as np

from router.index.page_table import Hashes


class PageNames:
    """One simulation's. Requests without a tenant are everybody's."""

    def __init__(self, users: int, epoch_s: float) -> None:
        """`users`: K; 0: no page of a tenant becomes public."""
        self._users = users
        self._epoch_s = epoch_s
        self._epoch_ends_at = epoch_s
        self._public: set[int] = set()
        self._owners: dict[int, set[str]] = defaultdict(set)  # of private pages
        self._asked: list[list[int]] = []  # in this epoch, with private pages

    def of(self, tenant: str, hashes: Hashes, now: float) -> Hashes:
        """The names of a prompt's pages for this tenant. It is asked now."""
        if not tenant:
            self._public.update(hashes.tolist() if self._users else ())
            return hashes
        if now >= self._epoch_ends_at:
            self._epoch_ends_at = now + self._epoch_s
            self._end_epoch()
        pages = hashes.tolist()
        public = self._leading_public(pages)
        if self._users and public < len(pages):
            self._asked.append(pages)
            for page in pages[public:]:
                if len(self._owners[page]) < 2 * self._users:
                    self._owners[page].add(tenant)
        own = [_digest(f"{tenant} {page}") for page in pages[public:]]
        return np.concatenate([hashes[:public], np.array(own, np.int64)])

    def _end_epoch(self) -> None:
        asked, self._asked = self._asked, []
        for pages in asked:
            at = self._leading_public(pages)
            while at < len(pages):
                enough = self._users + _digest(str(pages[at])) % self._users
                first = at
                while at < len(pages) and len(self._owners[pages[at]]) >= enough:
                    self._public.add(pages[at])
                    at += 1
                if at == first:
                    break
        for page in self._public & self._owners.keys():
            del self._owners[page]

    def _leading_public(self, pages: list[int]) -> int:
        for count, page in enumerate(pages):
            if page not in self._public:
                return count
        return len(pages)


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
