"""Which public pages a burst of guesses should take from everybody, told from the requests alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvcache.memory import Memory
from kvcache.tenancy.visibility import is_settled
from kvcache.tree_node import TreeNode
from wire.page_hash import PageDigest

FEW_PAGES = 4


class DemotionModel:
    """One memory's. A place is named by the digest of the last page of a match."""

    def __init__(self, built: Memory) -> None:
        self._built = built
        self._guesses: dict[str, list[PageDigest]] = {}
        self._late: set[PageDigest] = set()  # places that a move on a lower tier kept public

    def admitted(self, last: TreeNode | None, tenant: str, more_tokens: int) -> None:
        """A request has found the path of `last`: of nobody else's pages."""
        if last is None or last.parent is None:
            return
        assert {node.tenant for node in last.path()} <= {"", tenant}, "a match of another's pages"
        if last.tenant or not last.founders or tenant in last.founders:
            return
        if more_tokens < FEW_PAGES * self._built.page_size:
            digest = last.page_digests(self._built.page_size)[-1]
            self._guesses.setdefault(tenant, []).append(digest)

    @contextmanager
    def epoch_ends(self) -> Iterator[None]:
        """Around the end of an epoch."""
        promotion = self._built.promotion
        assert promotion is not None
        burst, most = self._built.config.tenancy.burst, 2 * self._built.config.tenancy.users
        bursts = [places for places in self._guesses.values() if burst and len(places) > burst]
        touched = {place for places in bursts for place in places} | self._late
        self._guesses, self._late = {}, set()
        common = {
            digest
            for node in self._nodes()
            if (used := promotion.usage.of(node)) and max(used.u_cnt_l, used.u_pre) >= most
            for digest in self._digests(node)
        }
        public = {
            digest
            for node in self._nodes()
            if node.founders and not node.tenant
            for digest in self._digests(node)
        }
        moving = {digest for node in self._nodes() if not is_settled(node) for digest in self._digests(node)}
        demoted = promotion.demotion.demoted_pages
        yield
        assert touched or promotion.demotion.demoted_pages == demoted, "demoted without a burst"
        for node in self._nodes():
            if node.tenant or not node.founders:
                continue
            for digest in self._digests(node):
                if digest not in public or digest in common:  # it has become public now, or is no secret
                    continue
                if self._path(node, digest).isdisjoint(touched):
                    continue
                assert moving, "what a burst has touched is public still"
                self._late.add(digest)

    def _nodes(self) -> Iterator[TreeNode]:
        return self._built.cache.tree.nodes()

    def _digests(self, node: TreeNode) -> list[PageDigest]:
        return node.page_digests(self._built.page_size)

    def _path(self, node: TreeNode, digest: PageDigest) -> set[PageDigest]:
        """All pages up to and with this one of the node."""
        pages = [page for one in node.path() for page in self._digests(one)]
        return set(pages[: pages.index(digest) + 1])
