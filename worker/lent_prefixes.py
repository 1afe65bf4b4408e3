"""LentPrefixes: prefixes of this worker's tree that stay where they are while another worker copies them.

A prefix is read on the device, and what of it is on the host alone is read there. Nothing is allocated or
loaded. What is locked is bounded by a share of each tier, and leaves the window pages that were promised to
requests when they were admitted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvcache.allocator import NO_PAGES, Pages
from kvcache.base_prefix_cache import MatchResult
from kvcache.memory import Memory
from kvcache.page_runs import PageIds, as_pages
from kvcache.radix_key import RadixKey
from kvcache.radix_tree import resident_part
from kvcache.tiers.reads import TierRead
from kvcache.tree_node import TreeNode
from wire.messages.transfer import GroupTarget, RefusalCause


class NotLent(Exception):
    """Nothing is lent."""

    def __init__(self, cause: RefusalCause, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause


@dataclass(slots=True, eq=False)
class LentPrefix:
    """The first `pages` pages of a prompt, locked. By group, a page's id is in `device`, or in `host` where
    that has a 0."""

    pages: int
    on_host: int  # of the pages, those that are not on the device
    last: TreeNode  # its end
    device: dict[str, PageIds]
    host: dict[str, PageIds]
    read: TierRead | None  # None: it is on the device alone
    window: Pages  # without `read`: the window pages that are locked besides the node

    @property
    def digest(self) -> bytes:
        """The full digest of the last page."""
        return self.last.page_digests(self.last.num_tokens // self.last.num_pages)[-1]


class LentPrefixes:
    """All of one worker. Engine loop's thread only."""

    def __init__(self, memory: Memory, share: float, spare_window_pages: Callable[[], int]) -> None:
        """`share`: of the pages of each tier, how many may be locked. `spare_window_pages`: how many window
        pages are left when what is promised to this worker's own requests is left out; less than 0 if some
        of that cannot be had."""
        self._memory = memory
        self._page_size = memory.page_size
        self._primary = memory.specs[0].name
        self._reads = None if memory.tiers is None else memory.tiers.reads
        self._most_on_device = int(share * memory.num_pages)
        self._most_on_host = int(share * (memory.host_tokens // memory.page_size))
        self._spare_window_pages = spare_window_pages
        self._lent: set[LentPrefix] = set()

    def lock(
        self, key: RadixKey, have: int, targets: Mapping[str, GroupTarget], from_host: bool
    ) -> LentPrefix:
        """The longest prefix of `key` that is here and fits the share. It must have more than `have` tokens.
        `targets`: of the requester. `from_host`: what is on the host alone can be sent. Raises NotLent."""
        match = self._memory.cache.match_prefix(key)
        here, below = len(match.device_indices), match.host_hit_length if from_host else 0
        if here + below <= have:
            raise NotLent(RefusalCause.ABSENT, f"{(here + below) // self._page_size} pages of it are here")
        lent = self._read(key[: here + below], match, targets) if below else None
        if lent is None and here > have:
            lent = self._locked(match)
        if lent is None:
            raise NotLent(RefusalCause.BUSY, "as many pages as may be lent are lent")
        self._lent.add(lent)
        if self._spare_window_pages() < 0:
            self.unlock(lent, is_whole=False)
            raise NotLent(RefusalCause.BUSY, "its window pages are promised to requests here")
        return lent

    def unlock(self, lent: LentPrefix, is_whole: bool) -> None:
        """Nothing of it is read any more. `is_whole`: all of it was read."""
        self._lent.remove(lent)
        if lent.read is not None:
            assert self._reads is not None, "a read without tiers"
            self._reads.end(lent.read, is_whole)
            return
        if self._memory.swa is not None:
            self._memory.swa.locks.unlock(lent.window)
        self._memory.cache.dec_lock_ref(lent.last)

    def window_from(self, pages: int) -> int:
        """The first window page that the end of so many pages needs."""
        swa = self._memory.swa
        return 0 if swa is None else swa.needed_from(pages * self._page_size)

    def _read(
        self, key: RadixKey, match: MatchResult, targets: Mapping[str, GroupTarget]
    ) -> LentPrefix | None:
        """Lock all of a prefix, which is on both tiers. None if that is too much."""
        assert self._reads is not None, "nothing is on a host without tiers"
        assert match.last_host_node is not None, "a part of it is on the host"
        pages = len(key) // self._page_size
        _, resident = resident_part(match.last_host_node.path())
        if not self._fits(resident, pages - resident):
            return None
        starts = {name: target.first_page for name, target in placed(targets, pages).items()}
        read = self._reads.begin_whole(key, starts)
        if read is None:
            return None
        device, host = (
            {group: as_pages(ids) for group, ids in tier.items()} for tier in (read.device, read.host)
        )
        return LentPrefix(pages, pages - resident, read.last, device, host, read, NO_PAGES)

    def _locked(self, match: MatchResult) -> LentPrefix | None:
        """Lock what is on the device. None if that is too much."""
        pages, node = len(match.device_indices) // self._page_size, match.last_device_node
        if not self._fits(pages, 0):
            return None
        assert node is not None, "a prefix has an end"
        self._memory.cache.inc_lock_ref(node)
        window = match.part("window")[self.window_from(pages) :]
        if self._memory.swa is not None:
            self._memory.swa.locks.lock(window)
        device: dict[str, PageIds] = {
            self._primary: as_pages(match.device_indices[:: self._page_size] // self._page_size),
            **{name: as_pages(part) for name, part in match.parts.items()},
        }
        return LentPrefix(pages, 0, node, device, {}, None, window)

    def _fits(self, on_device: int, on_host: int) -> bool:
        on_device += sum(one.pages - one.on_host for one in self._lent)
        on_host += sum(one.on_host for one in self._lent)
        return on_device <= self._most_on_device and on_host <= self._most_on_host


def placed(targets: Mapping[str, GroupTarget], pages: int) -> dict[str, GroupTarget]:
    """Where a prefix of `pages` pages goes. A window's pages are the last ones of it."""
    moved = dict(targets)
    if "window" in moved:
        ids = moved["window"].page_ids
        moved["window"] = GroupTarget(max(pages - len(ids), 0), ids)
    return moved
