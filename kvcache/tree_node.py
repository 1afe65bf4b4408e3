"""TreeNode: consecutive pages that are cached together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.host_copy import HostCopy
from kvcache.radix_key import Namespace, root_slot
from wire.page_hash import PageDigest, owner_key, page_digests

TOKEN_BYTES = 4
PAGE_ID_BYTES = 4
COPY = 1 << 32
"""In `TreeNode.offers`: the pages were fetched from a worker that has them, too. A field of its own would
make every node larger."""
FINAL = 1 << 33
"""In `TreeNode.offers`: the node is private for ever. It is only ever set."""
ONE_CHANCE, ALL_CHANCES = 1 << 34, 7 << 34
"""In `TreeNode.offers`: how often the node stays when it would be evicted (second_chances.py)."""
NO_PARTS: dict[str, Any] = {}
"""The parts of every node of a tree that has the primary group only; it stays empty."""
NO_FOUNDERS: tuple[str, ...] = ()
"""The founders of a node that is private, or that was public from the start."""
UNKNOWN = ("",)
"""The founders of a public node that storage had."""


class TreeNode:
    """Whole pages of one namespace, public or one tenant's, below the pages of `parent`. A public node has a
    public parent.

    `tokens` are int32 as bytes (a bigram node has one more than its units), and `page_ids` those of the
    primary group, one int32 per page, as bytes too: few objects, and one C call each to compare or join.
    `parts` holds what the other groups keep on this node, by group name.

    A node is resident while its pages are on the device. Where there is a host tier, a node may be on the
    host alone: it has no page ids then, and `host` says what is there. The parent of a resident node is
    resident.
    """

    __slots__ = (
        "children", "created", "digests", "entry", "hit_count", "host", "last_access", "lock_ref",
        "namespace", "num_pages", "offers", "page_ids", "parent", "parts", "priority",
        "resident_children", "tenant", "tokens",
    )  # fmt: skip

    founders = NO_FOUNDERS  # see SharedTreeNode
    usage = 0

    def __init__(
        self,
        parent: TreeNode | None,
        namespace: Namespace,
        tokens: bytes,
        page_ids: bytes,
        num_pages: int,
        tick: int,
        tenant: str = "",
    ) -> None:
        """`page_ids` is empty for a node on the host alone; a resident one has an id for each page."""
        self.parent = parent
        self.namespace = namespace
        self.tokens = tokens
        self.page_ids = page_ids
        self.num_pages = num_pages
        self.children: dict[bytes, TreeNode] = {}
        self.resident_children = 0
        self.host: HostCopy | None = None
        self.parts = NO_PARTS
        self.digests: list[PageDigest] | None = None  # one per page, computed on first use
        self.lock_ref = 0  # locks on this node or below it
        self.created = tick
        self.last_access = tick
        self.hit_count = 0
        self.priority = 0
        self.tenant = tenant  # whose requests alone may use these pages; "": everybody's
        self.offers = 0  # a bit for each evictor that has this node on offer, COPY, FINAL, chances
        self.entry: list[Any] | None = None  # the leaf evictor's entry of this node

    @property
    def value(self) -> npt.NDArray[np.int32]:
        """The page ids, a read-only view."""
        return np.frombuffer(self.page_ids, np.int32)

    @property
    def num_tokens(self) -> int:
        """Tokens of the pages; in a bigram namespace units."""
        return len(self.tokens) // TOKEN_BYTES - self.namespace.is_bigram

    @property
    def is_resident(self) -> bool:
        """Whether the pages are on the device."""
        return bool(self.page_ids)

    @property
    def is_copy(self) -> bool:
        """Whether the pages were fetched from a worker that has them, too."""
        return bool(self.offers & COPY)

    @property
    def permanently_private(self) -> bool:
        """Whether these pages never become public, as all below them (kvcache/tenancy/marks.py)."""
        return bool(self.offers & FINAL)

    def token_array(self) -> npt.NDArray[np.int32]:
        """The tokens, a read-only view."""
        return np.frombuffer(self.tokens, np.int32)

    def child_key(self, page_size: int, parent: TreeNode | None = None) -> bytes:
        """The key of this node in the children of its parent, or of `parent`: the tokens of its first page.
        Below the root the namespace comes before them. A private child of a node that is not its owner's has
        its owner before all else."""
        above = parent or self.parent
        assert above is not None, "the root has no parent"
        first = self.tokens[: (page_size + (1 if self.namespace.is_bigram else 0)) * TOKEN_BYTES]
        if above.parent is None:
            return root_slot(self.namespace, self.tenant, first)
        return owner_key(self.tenant) + first if self.tenant and self.tenant != above.tenant else first

    def path(self) -> list[TreeNode]:
        """From below the root to this node; empty for the root."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def descendants(self) -> Iterator[TreeNode]:
        """Every node below this one, parents before children."""
        stack = list(self.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def common_pages(self, raw: bytes, at: int, stride: int, extra: int) -> int:
        """Whole pages on which this node and the key `raw` from byte `at` agree; at least the first.

        A page is `stride` bytes of tokens, and needs `extra` bytes more to be complete.
        """
        mine = self.token_array()
        theirs = np.frombuffer(raw, np.int32, offset=at)
        n = min(len(mine), len(theirs))
        differs = np.flatnonzero(mine[:n] != theirs[:n])
        same = int(differs[0]) if len(differs) else n
        return (same * TOKEN_BYTES - extra) // stride

    def page_digests(self, page_size: int) -> list[PageDigest]:
        """The hash chain over this node's pages, computed on first use for the whole path."""
        if self.digests is None:
            digest = self.namespace.seed
            for node in self.path():
                if node.digests is None:
                    node.digests = page_digests(digest, node.tokens, page_size, node.namespace.is_bigram)
                digest = node.digests[-1]
            assert self.digests is not None, "the root has no pages"
        return self.digests

    def split(self, pages: int, page_size: int) -> TreeNode:
        """Insert a new node between this one and its parent, and move the first `pages` pages there.

        This node keeps its identity and its children; the new one gets the same locks, hits and age.
        """
        parent = self.parent
        assert parent is not None, "the root is not split"
        extra = 1 if self.namespace.is_bigram else 0
        border = pages * page_size
        upper = type(self)(
            parent,
            self.namespace,
            self.tokens[: (border + extra) * TOKEN_BYTES],
            self.page_ids[: pages * PAGE_ID_BYTES],
            pages,
            self.created,
            self.tenant,
        )
        upper.resident_children = 1 if self.page_ids else 0
        upper.last_access = self.last_access
        upper.lock_ref = self.lock_ref
        upper.hit_count = self.hit_count
        upper.priority = self.priority
        upper.offers = self.offers & (COPY | FINAL | ALL_CHANCES)
        if self.host is not None:
            upper.host = self.host.upper_half()
        if self.digests is not None:
            upper.digests, self.digests = self.digests[:pages], self.digests[pages:]
        parent.children[self.child_key(page_size)] = upper
        self.tokens = self.tokens[border * TOKEN_BYTES :]
        self.page_ids = self.page_ids[pages * PAGE_ID_BYTES :]
        self.num_pages -= pages
        self.parent = upper
        upper.children[self.child_key(page_size)] = self
        return upper


class SharedTreeNode(TreeNode):
    """A node of a tree in which tenants share pages.

    `founders` are, of a node that has become public, the tenants who had computed its pages. `usage` has its
    counters (kvcache/tenancy/usage.py).
    """

    __slots__ = ("founders", "usage")

    def __init__(
        self,
        parent: TreeNode | None,
        namespace: Namespace,
        tokens: bytes,
        page_ids: bytes,
        num_pages: int,
        tick: int,
        tenant: str = "",
    ) -> None:
        super().__init__(parent, namespace, tokens, page_ids, num_pages, tick, tenant)
        self.founders = NO_FOUNDERS
        self.usage = 0

    def split(self, pages: int, page_size: int) -> TreeNode:
        upper = shared(super().split(pages, page_size))
        upper.founders, upper.usage = self.founders, self.usage
        return upper


def shared(node: TreeNode) -> SharedTreeNode:
    """A node of a tree in which tenants share pages, but for its root."""
    assert isinstance(node, SharedTreeNode), "tenants share no pages in this tree"
    return node
