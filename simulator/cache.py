"""PrefixCache: the KV memory of one modelled worker.

    capacity = cached pages (locked or evictable) + held (tokens of requests outside the cache) + free

A page is named by its hash, which is chained over everything before it. So a set of hashes implies the tree:
a prompt's match is the number of its leading pages in the set. The least recently used page is evicted first.
A path is always touched from its end to its root, so a page is more recent than everything below it and the
oldest page is a leaf. Therefore an ordered dict is enough, where a real tree needs a heap of leaves.

Pages that were fetched from another worker are *copies*, and so is less than that which is computed below
them. With more, they are copies no longer. Copies are evicted before all others. Everything below a copy is a
copy, so here, too, leaves go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from router.index.page_table import Hashes


class PrefixCache:
    """Cached pages, and memory held outside the cache."""

    def __init__(
        self,
        capacity: int,
        page: int,
        stored: Callable[[list[int]], None],
        removed: Callable[[list[int]], None],
    ) -> None:
        """`capacity` is in tokens, and a page has `page` tokens.

        `stored` and `removed` are called with the pages that enter and leave the cache.
        """
        self.page = page
        self.capacity = capacity
        self.held = 0  # tokens
        self._stored = stored
        self._removed = removed
        self._locked: dict[int, int] = {}  # page -> number of users
        self._evictable: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._evictable_copies: OrderedDict[int, None] = OrderedDict()  # the same, of copies
        self._copies: set[int] = set()

    def pages(self) -> set[int]:
        """All cached pages."""
        return self._locked.keys() | self._evictable.keys() | self._evictable_copies.keys()

    @property
    def locked(self) -> int:
        """Cached tokens in use."""
        return len(self._locked) * self.page

    @property
    def available(self) -> int:
        """Tokens that are free or evictable."""
        return self.capacity - self.held - self.locked

    def match(self, hashes: Hashes) -> int:
        """The number of leading pages that are cached. Changes nothing."""
        locked, evictable, copies = self._locked, self._evictable, self._evictable_copies
        found = 0
        for page in hashes.tolist():
            if page not in locked and page not in evictable and page not in copies:
                break
            found += 1
        return found

    def lock(self, hashes: Hashes) -> None:
        """Keep these cached pages until `unlock`."""
        locked = self._locked
        for page in hashes.tolist():
            if page in locked:
                locked[page] += 1
            else:
                del self._where_evictable(page)[page]
                locked[page] = 1

    def unlock(self, hashes: Hashes) -> None:
        """Undo one `lock` of these pages. The end of the path becomes evictable first."""
        locked = self._locked
        for page in reversed(hashes.tolist()):
            if locked[page] == 1:
                del locked[page]
                self._where_evictable(page)[page] = None
            else:
                locked[page] -= 1

    def hold(self, tokens: int) -> bool:
        """Take memory for this many tokens, evicting pages if necessary.

        Returns False, and changes nothing, if there is not enough.
        """
        if tokens > self.available:
            return False
        self.held += tokens
        self._evict()
        return True

    def release(self, tokens: int) -> None:
        """Return held memory."""
        assert 0 <= tokens <= self.held
        self.held -= tokens

    def insert(self, above: Hashes, hashes: Hashes, copies: bool = False) -> None:
        """Turn held tokens into these cached, locked pages, which follow on `above`, locked, too.

        Pages that are cached already are reused. Copies are pages that another worker computed.
        """
        locked, new = self._locked, []
        for page in hashes.tolist():
            if page in locked:
                locked[page] += 1
                continue
            where = self._where_evictable(page)
            if page in where:
                del where[page]
            else:
                new.append(page)
            locked[page] = 1
        self.release(len(hashes) * self.page)
        if self._copies and not copies:
            copies = len(new) < sum(page in self._copies for page in above.tolist())
        if copies:
            self._copies.update(new)
        elif self._copies:
            self._copies.difference_update(above.tolist(), hashes.tolist())
        if new:
            self._stored(new)

    def _where_evictable(self, page: int) -> OrderedDict[int, None]:
        return self._evictable_copies if page in self._copies else self._evictable

    def _evict(self) -> None:
        evictable, copies = self._evictable, self._evictable_copies
        used = self.held + (len(self._locked) + len(evictable) + len(copies)) * self.page
        gone = []
        while used > self.capacity:
            gone.append((copies or evictable).popitem(last=False)[0])
            self._copies.discard(gone[-1])
            used -= self.page
        if gone:
            self._removed(gone)
