"""Promotion: which private pages become public, and when.

Pages become public when enough tenants have computed them, each for itself, and what they continue is public.
"Enough" is drawn for each place in the tree from [K, 2K), by a secret of the worker: who has K - 1 accounts
can neither make pages public nor find out by trying who else has them. The decision falls at the end of an
epoch, for all that came in it, so it does not answer to one request.

One copy becomes public and the others give way to it; what is below them is looked at next. Copies under a
lock give way at the end of a later epoch.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

from kvcache.mixed_path import mixed_path
from kvcache.radix_key import OWNER_BYTES, RadixKey
from kvcache.radix_tree import RadixTree
from kvcache.tenancy.config import TenancyConfig
from kvcache.tenancy.demotion import Demotion
from kvcache.tenancy.usage import NodeUsage
from kvcache.tenancy.visibility import fold, is_in_tree, is_settled, is_superseded, publish
from kvcache.tree_node import TOKEN_BYTES, TreeNode
from wire.page_hash import tenant_of_key


class Promotion:
    """One tree's. All methods are called on the tree's thread."""

    def __init__(self, tree: RadixTree, config: TenancyConfig) -> None:
        self.public_pages = 0  # that have become public since the start
        self.merged_copies = 0  # nodes that gave way to others since the start
        self.usage = NodeUsage(2 * config.users)
        self.demotion = Demotion(tree, self.usage, config.burst)
        self._tree = tree
        self._config = config
        self._parents: dict[TreeNode, None] = {}  # public nodes below which something is new, in order
        self._epoch_ends_at = 0.0

    def admitted(self, tenant: str, last: TreeNode | None, more_tokens: int) -> None:
        """A request of `tenant` (its key string; "": of nobody) was admitted, and has locked what the cache
        has of it: the path of `last`. `more_tokens` of its prompt are not cached."""
        if last is not None:
            name, _ = tenant_of_key(tenant)
            self.usage.used(last.path(), name, hits=1)
            self.demotion.admitted(name, last, more_tokens)

    def inserted(self, tenant: str, path: Sequence[TreeNode]) -> None:
        """A request of `tenant` has inserted `path`, or used it: look at where its own pages begin."""
        self.usage.used(path, tenant_of_key(tenant)[0])
        first = next((node for node in path if node.tenant), None)
        if first is not None and first.parent is not None:
            self._parents[first.parent] = None

    def arrived(self, node: TreeNode) -> None:
        """A public node has come that no tenant has made so here: copies of its pages give way to it."""
        assert node.parent is not None, "the root was always there"
        self._parents[node.parent] = None

    def may_grow(self, key: RadixKey, last: TreeNode | None) -> bool:
        """Whether a request that has locked the path of `last` may add the pages of `key` to it: not if some
        of it was demoted, nor if its tenant has them in a copy of what is public. The tree would have a page
        twice, under one name."""
        if last is None:
            return True
        if any(map(self.demotion.holds, last.path())):
            return False
        if not key.tenant:
            return True
        if is_superseded(self._tree, last):
            return False
        size, root = self._tree.page_size, self._tree.root
        return mixed_path(key, size, root, None).pages <= mixed_path(key, size, root, last).pages

    def tick(self, now: float) -> None:
        """Called every now and then: end the epoch when its time has come. Seconds of one clock."""
        if now >= self._epoch_ends_at:
            self._epoch_ends_at = now + self._config.epoch_s
            self.end_epoch()
        else:
            self.demotion.go_on()

    def end_epoch(self) -> None:
        """Demote what a burst has touched, make public what has enough owners, and let copies of public pages
        give way."""
        self.demotion.end_epoch()
        self.usage.next_epoch()
        parents, self._parents = list(self._parents), {}
        while parents:
            parent = parents.pop()
            if not parent.tenant and is_in_tree(self._tree, parent):
                parents += self._share_below(parent)

    def _share_below(self, parent: TreeNode) -> list[TreeNode]:
        """The public children of `parent` below which copies have come together."""
        copies: dict[bytes, list[TreeNode]] = {}
        for slot, child in parent.children.items():
            if child.tenant and not self.demotion.holds(child):
                copies.setdefault(slot[OWNER_BYTES:], []).append(child)
        grown = []
        for slot, owned in copies.items():
            may_be_public = [copy for copy in owned if not copy.permanently_private]
            if slot not in parent.children and not self._publish(parent, may_be_public):
                continue
            for copy in owned:
                if not copy.tenant or copy.parent is not parent:
                    continue  # the one that has become public, or the rest of it
                if fold(self._tree, self.usage, copy, parent.children[slot]):
                    self.merged_copies += 1
                else:
                    self._parents[parent] = None
            grown.append(parent.children[slot])
        return grown

    def _publish(self, parent: TreeNode, copies: Sequence[TreeNode]) -> bool:
        """Make the longest beginning public that enough of `copies` share. Whether there is one."""
        # A tenant that was forgotten may have one of each generation for a moment.
        copies = list({tenant_of_key(copy.tenant)[0]: copy for copy in copies}.values())
        if len(copies) < self._config.users:  # no place needs fewer: most children end here, and cost no hash
            return False
        enough, size = self._threshold(copies[0]), self._tree.page_size
        if len(copies) < enough:
            return False
        pages = 0
        for page in itertools.count():
            parts: dict[bytes, list[TreeNode]] = {}
            for copy in copies:
                if page < copy.num_pages:
                    parts.setdefault(self._page(copy, page), []).append(copy)
            most = max(parts.values(), key=len, default=[])
            if len(most) < enough or self.demotion.is_barred(most[0].page_digests(size)[page]):
                break
            copies, pages = most, page + 1
        resident = [copy for copy in copies if copy.is_resident]
        donor = next(filter(is_settled, resident or copies), None)
        if donor is None or not pages:
            self._parents[parent] = None
            return False
        (node,) = self._tree.cut([donor], pages)
        owners = sorted(tenant_of_key(copy.tenant)[0] for copy in copies)
        publish(self._tree, node, tuple(owners[: self.usage.most_users]))
        self.demotion.promoted(node)
        self.public_pages += node.num_pages
        return True

    def _page(self, node: TreeNode, page: int) -> bytes:
        stride = self._tree.page_size * TOKEN_BYTES
        extra = TOKEN_BYTES if node.namespace.is_bigram else 0
        return node.tokens[page * stride : (page + 1) * stride + extra]

    def _threshold(self, node: TreeNode) -> int:
        """How many owners the place of `node` in the tree needs."""
        place = node.page_digests(self._tree.page_size)[0]
        drawn = hashlib.blake2b(place, key=self._config.secret[:64], digest_size=8).digest()
        return self._config.users + int.from_bytes(drawn, "little") % self._config.users
