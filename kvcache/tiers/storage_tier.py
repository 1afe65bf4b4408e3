"""StorageTier: pages between the host and a storage backend. The backend is called on the mover's threads.

write      after a backup has landed, and again later if that fails: the node's     host -> storage
           host pages
remove     what has stopped being public, under its public names
look       what the backend holds, for `stats`
prefetch   what a request's prompt has there, while the request waits               storage -> host
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from kvcache.radix_tree import RadixTree
from kvcache.storage.backend import StorageBackend, StorageStats
from kvcache.storage.blob_store import Held
from kvcache.storage.keys import StorageKeys
from kvcache.tenancy.promotion import Promotion
from kvcache.tiers.backlog import StorageBacklog
from kvcache.tiers.config import TierConfig
from kvcache.tiers.host_tier import HostTier
from kvcache.tiers.mover import Failed, WorkQueue
from kvcache.tiers.pieces import pieces
from kvcache.tiers.prefetch import StorageCounts
from kvcache.tiers.prefetches import Prefetches
from kvcache.tree_node import TreeNode

_LOOK_S = 1.0  # between two looks at what the backend holds
_AGAIN_S = 5.0  # before a removal that failed is tried again
_HOST_SHARE = 4
"""Writes keep about one host page in so many from giving way. A storage that stands still would keep all."""


class StorageTier:
    """One worker's storage. All methods are called on the tree's thread."""

    def __init__(
        self,
        config: TierConfig,
        tree: RadixTree,
        host: HostTier,
        mover: WorkQueue,
        backend: StorageBackend,
        keys: StorageKeys,
        backlog: StorageBacklog,
        clock: Callable[[], float] = time.monotonic,
        promotion: Promotion | None = None,
    ) -> None:
        """`promotion` is told of public nodes that have come from there, where tenants share."""
        self.counts = StorageCounts()
        self.backend = backend
        self.prefetches = Prefetches(config, tree, host, mover, backend, keys, self.counts, clock, promotion)
        self._tree = tree
        self._host = host
        self._mover = mover
        self._keys = keys
        self._backlog = backlog
        self._clock = clock
        self._look_at = -math.inf  # inf: a look is under way
        self._remove_at = -math.inf  # later: the last removal has failed
        self._writing: set[TreeNode] = set()
        self._kept: Counter[str] = Counter()  # host pages that writes keep, by group
        self._most_kept = {g: arena.num_pages // _HOST_SHARE for g, arena in host.pool.arenas.items()}
        self._is_full = False  # nothing more is written before a write has ended
        self._primary = tree.components[0].name

    # -- writing -----------------------------------------------------------------------------------

    def write_new(self) -> None:
        """Begin to write what has come to the host and is not stored, as far as that does not keep too much
        there. The rest waits, and may give way meanwhile. So does what has come for a node that is being
        written."""
        self._backlog.resume(self._clock())
        if self._is_full:  # this is called in every turn of the loop
            return
        busy = []
        while (node := self._backlog.first()) is not None:
            if node in self._writing:
                busy.append(node)
            elif node.host is not None and not node.host.stored:
                keeps = self._keeps(node)
                if self._writing and any(self._kept[g] + n > self._most_kept[g] for g, n in keeps.items()):
                    self._is_full = True
                    break
                self._write(node, keeps, self._backlog.delay_s(node))
            self._backlog.drop(node)
        for node in busy:
            self._backlog.add(node)

    def _keeps(self, node: TreeNode) -> Counter[str]:
        """How many host pages cannot give way while the node is written, by group: its own, and those above
        it, because copies go leaf first. What is above a node that is being written is counted there."""
        assert node.host is not None, "the node has no copy"
        keeps = Counter({group: int(np.count_nonzero(ids)) for group, ids in node.host.ids.items()})
        above = node.parent
        while above is not None and above not in self._writing:
            keeps[self._primary] += above.num_pages
            above = above.parent
        return keeps

    def remove_withdrawn(self) -> None:
        """Begin to remove what has stopped being public since the last call, whoever has stored it, and what
        could not be removed some time ago."""
        if self._clock() < self._remove_at:
            return
        digests = self._backlog.take_withdrawn()
        if not digests:
            return
        keys = [key for group in self._host.parts for key in self._keys.keys(group, digests)]

        def done(told: list[bool] | Failed) -> None:
            gone = [False] * len(keys) if isinstance(told, Failed) else told
            left = [page for at, page in enumerate(digests) if not all(gone[at :: len(digests)])]
            if left:
                self._backlog.withdraw_again(left)
                self._remove_at = self._clock() + _AGAIN_S

        self._mover.submit("writes", lambda: self.backend.remove(keys), done)

    def _write(self, node: TreeNode, keeps: Counter[str], delay_s: float) -> None:
        """`delay_s`: for how long it was put off before."""
        copy = node.host
        assert copy is not None, "the node has no copy"
        digests = node.page_digests(self._tree.page_size)
        names: list[bytes] = []
        blobs: list[memoryview] = []
        for group, ids in copy.ids.items():
            of = digests if len(ids) == len(digests) and self._is_by_page(group) else digests[-1:]
            for name, page in zip(self._keys.keys(group, of, node.tenant), ids.tolist(), strict=True):
                if page:
                    names.append(name)
                    blobs.append(self._host.pool.arenas[group].view(page))
        copy.locks += 1
        pages, tenant = node.num_pages, node.tenant
        self._writing.add(node)
        self._kept.update(keeps)

        def done(told: list[bool] | Failed) -> None:
            self._kept.subtract(keeps)
            self._is_full = False
            for piece in self._written(node, pages, told):
                if piece.tenant == tenant:  # else it was withdrawn, or its new owner's is in the backlog
                    self._backlog.put_off(piece, delay_s, self._clock())

        self._mover.submit("writes", lambda: self.backend.set(names, blobs), done)

    def _written(self, node: TreeNode, pages: int, told: list[bool] | Failed) -> list[TreeNode]:
        """Returns the nodes that storage still lacks."""
        self._writing.discard(node)
        lacking = []
        is_whole = not isinstance(told, Failed) and all(told)
        for piece, _, _ in pieces(node, pages):
            assert piece.host is not None, "a node's copy went while it was read"
            self._host.unlock(piece)
            waits = piece in self._backlog or piece in self._writing  # more of it has come meanwhile
            if piece.host is None or waits:
                continue
            if is_whole:
                self._host.stored(piece)
            else:
                lacking.append(piece)
        if is_whole:
            self.counts.written_pages += pages
        else:
            self.counts.failed_writes += 1
        return lacking

    def _is_by_page(self, group: str) -> bool:
        return self._host.parts[group].is_by_page

    # -- clearing ----------------------------------------------------------------------------------

    def clear(self, done: Callable[[int | Failed | None], None]) -> None:
        """Forget all that the backend has, also what other workers have stored there, and what waits to be.

        `done` is called in a later poll, with the number of blobs that the backend said it removed; None: it
        cannot remove any.
        """
        waiting = self._backlog.take_all()  # else it would be written after that

        def work() -> int | None:
            removed = self.backend.clear()
            return removed.blobs if removed is not None else None

        def cleared(told: int | Failed | None) -> None:
            for node in self._tree.nodes() if told is not None else waiting:
                if node.host is not None:
                    self._host.not_stored(node)
                    if told is None:
                        self._backlog.add(node)
            done(told)

        self._mover.submit("writes", work, cleared)  # behind the writes that are under way

    def forget(self, prefixes: Sequence[bytes], done: Callable[[Held | Failed | None], None]) -> None:
        """Remove all blobs whose keys begin with one of `prefixes`, also what other workers have stored.

        `done` is called in a later poll, with what was removed; None: the backend cannot remove by prefix.
        """

        def work() -> Held | None:
            told = [self.backend.clear(prefix) for prefix in prefixes]
            removed = [one for one in told if one is not None]
            if len(removed) < len(told):
                return None
            return Held(sum(one.blobs for one in removed), sum(one.nbytes for one in removed))

        self._mover.submit("writes", work, done)  # behind the writes that are under way

    # -- looking -----------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether nothing is written or read."""
        return not self._writing and not self.prefetches

    def stats(self) -> StorageStats:
        """What the backend has done, and what it held a short time ago. Never waits for it."""
        if self._clock() >= self._look_at:
            self._look_at = math.inf
            self._mover.submit("looks", self.backend.stats, self._looked)
        return self.backend.last_stats()

    def _looked(self, _: object) -> None:
        self._look_at = self._clock() + _LOOK_S

    def queued(self) -> dict[str, int]:
        """How many nodes are written or to be written, and how many prefetches are under way."""
        return {"to_storage": len(self._writing) + len(self._backlog), "from_storage": len(self.prefetches)}
