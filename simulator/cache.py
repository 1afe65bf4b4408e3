"""PrefixCache: the KV memory of one modelled worker: pages of prompts that are cached, tokens that are not.

    capacity = cached pages (locked or evictable) + held (tokens of requests outside the cache) + free

A page is named by its hash, a chain over everything before it, so the tree is implied: a prompt's match is
the number of its leading pages that are there. Least recently used goes first. A path is always touched from
its end to its root, so a page is more recent than everything below it, and the oldest one is a leaf: an
ordered dict is enough, where a real tree needs a heap of leaves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from router.index.page_table import Hashes


class PrefixCache:
    """One worker's. `stored` and `removed` are told what the router's index should learn."""

    def __init__(
        self,
        capacity: int,
        page: int,
        stored: Callable[[list[int]], None],
        removed: Callable[[list[int]], None],
    ) -> None:
        """`capacity` in tokens, pages of `page` tokens."""
        self.page = page
        self.capacity = capacity
        self.held = 0  # tokens
        self._stored = stored
        self._removed = removed
        self._locked: dict[int, int] = {}  # page -> who uses it
        self._evictable: OrderedDict[int, None] = OrderedDict()  # oldest first

    def pages(self) -> set[int]:
        """Everything that is cached."""
        return self._locked.keys() | self._evictable.keys()

    @property
    def locked(self) -> int:
        """Cached tokens that somebody uses."""
        return len(self._locked) * self.page

    @property
    def available(self) -> int:
        """Tokens that are free or could be."""
        return self.capacity - self.held - self.locked

    def match(self, hashes: Hashes) -> int:
        """Leading pages that are cached. Touches nothing."""
        locked, evictable = self._locked, self._evictable
        found = 0
        for page in hashes.tolist():
            if page not in locked and page not in evictable:
                break
            found += 1
        return found

    def lock(self, hashes: Hashes) -> None:
        """Keep these cached pages until `unlock`."""
        locked, evictable = self._locked, self._evictable
        for page in hashes.tolist():
            if page in locked:
                locked[page] += 1
            else:
                del evictable[page]
                locked[page] = 1

    def unlock(self, hashes: Hashes) -> None:
        """They, in the same number of calls as `lock`, may go. The end of the path is the first to."""
        locked, evictable = self._locked, self._evictable
        for page in reversed(hashes.tolist()):
            if locked[page] == 1:
                del locked[page]
                evictable[page] = None
            else:
                locked[page] -= 1

    def hold(self, tokens: int) -> bool:
        """Memory for so many tokens, evicting what must go; False, and nothing happens, if there is not as
        much."""
        if tokens > self.available:
            return False
        self.held += tokens
        self._evict()
        return True

    def release(self, tokens: int) -> None:
        """Give held memory back."""
        assert 0 <= tokens <= self.held
        self.held -= tokens

    def insert(self, hashes: Hashes) -> None:
        """Held tokens become these cached, locked pages. What somebody else has cached meanwhile is used."""
        locked, evictable, new = self._locked, self._evictable, []
        for page in hashes.tolist():
            if page in locked:
                locked[page] += 1
                continue
            if page in evictable:
                del evictable[page]
            else:
                new.append(page)
            locked[page] = 1
        self.release(len(hashes) * self.page)
        if new:
            self._stored(new)

    def _evict(self) -> None:
        used = self.held + (len(self._locked) + len(self._evictable)) * self.page
        gone = []
        while used > self.capacity:
            gone.append(self._evictable.popitem(last=False)[0])
            used -= self.page
        if gone:
            self._removed(gone)
