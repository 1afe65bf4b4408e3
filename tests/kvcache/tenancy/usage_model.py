"""What the counters of a tree's nodes should be, counted for each page that is cached on the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from kvcache.memory import Memory
from kvcache.radix_key import Namespace

_Content = tuple[Namespace, tuple[int, ...]]  # the tokens up to the end of the page


class UsageModel:
    """One memory's, which has no host tier. `slots` are the first ones of pages."""

    def __init__(self, built: Memory) -> None:
        self._built = built
        self._most = 2 * built.config.tenancy.users
        self._hits: dict[int, int] = {}  # by page
        self._users: dict[int, set[str]] = {}
        self._before: dict[int, tuple[int, int]] = {}  # hits and tenants of the epoch before

    def found(self, tenant: str, slots: Iterable[int]) -> None:
        """A request was admitted."""
        for page in self.has(tenant, slots):
            self._hits[page] = self._hits.get(page, 0) + 1

    def has(self, tenant: str, slots: Iterable[int]) -> list[int]:
        """A tenant's request has put these pages into the tree, or found them there; the pages."""
        pages = [slot // self._built.page_size for slot in slots]
        for page in pages:
            self._users.setdefault(page, set()).add(tenant)
        return pages

    @contextmanager
    def epoch_ends(self) -> Iterator[None]:
        """Around the end: what the pages counted that gave way is added to those that were kept."""
        before = self._pages()
        yield
        used = self._hits.keys() | self._users.keys()
        self._before = {
            page: (self._hits.get(page, 0), min(len(self._users.get(page, ())), self._most)) for page in used
        }
        self._hits, self._users = {}, {}
        after = self._pages()
        public = {content: page for page, (tenant, content) in after.items() if not tenant}
        for page in before.keys() - after.keys():
            kept = public.get(before[page][1])
            if kept is not None and page in self._before:
                hits, users = self._before.pop(page)
                more = self._before.get(kept, (0, 0))
                self._before[kept] = hits + more[0], min(users + more[1], self._most)

    def check(self) -> None:
        """Assert that every node has the counters of each of its pages; forget pages that were evicted."""
        promotion = self._built.promotion
        if promotion is None:
            assert not any(node.usage for node in self._built.cache.tree.nodes())
            return
        there = set()
        for node in self._built.cache.tree.nodes():
            counters = promotion.usage.of(node)
            for page in node.value.tolist():
                there.add(page)
                users = self._users.get(page, set())
                now = self._hits.get(page, 0), min(len(users), self._most)
                assert counters == (*now, *self._before.get(page, (0, 0)))
                assert not node.tenant or len(users) <= 1 or promotion.demotion.holds(node)
        for counted in (self._hits, self._users, self._before):
            for page in counted.keys() - there:
                del counted[page]

    def _pages(self) -> dict[int, tuple[str, _Content]]:
        """Page -> whose it is, and what."""
        size, pages = self._built.page_size, {}
        for node in self._built.cache.tree.nodes():
            path = np.frombuffer(b"".join(step.tokens for step in node.path()), np.int32).tolist()
            start = len(path) - node.num_tokens
            for i, page in enumerate(node.value.tolist()):
                tokens = tuple(path[: start + (i + 1) * size])
                pages[page] = node.tenant, (node.namespace, tokens)
        return pages
