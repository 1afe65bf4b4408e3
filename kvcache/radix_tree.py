"""RadixTree: the structure of cached prefixes = nodes + components + eviction policy + observers.

The tree finds, splits, links, locks, evicts and unlinks nodes. What a node means for memory is the business
of the components; TreeObservers are told of new and removed nodes. A child is found by its first page, below
the root by namespace and first page, and a tenant's child of a public node by its owner, too: private
prefixes of different tenants meet nowhere. Where tenants share pages (kvcache/tenancy), a path is public
nodes and then one tenant's.

Per node on the path a match costs one dict lookup and one comparison of bytes; nothing is done per token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from kvcache.allocator import NO_PAGES, Pages
from kvcache.balance import in_slices
from kvcache.components.base import Tally, TreeComponent, longest
from kvcache.host_copy import HostCopy
from kvcache.lower_tier import LowerTier
from kvcache.mixed_path import mixed_path
from kvcache.named_path import named_path
from kvcache.observer import StorageMedium, TreeObserver
from kvcache.radix_key import Namespace, RadixKey
from kvcache.second_chances import use_chance
from kvcache.shares.evictor import SharedEvictor
from kvcache.tree_node import ALL_CHANCES, COPY, FINAL, TOKEN_BYTES, SharedTreeNode, TreeNode
from wire.page_hash import owner_key
from wire.request import NO_MARKS


class RadixTree:
    """Prefixes of all namespaces under one root, which holds nothing and is never evicted."""

    def __init__(
        self,
        page_size: int,
        components: Sequence[TreeComponent] = (),
        observers: Sequence[TreeObserver] = (),
        lower: LowerTier | None = None,
        shares: bool = False,
    ) -> None:
        """The first component is the primary group's. Without components the tree stays empty. `lower`: the
        tier to which evicted nodes may go. `shares`: tenants use public pages."""
        self.page_size = page_size
        self.lower = lower
        self.shares = shares
        self._new_node: type[TreeNode] = SharedTreeNode if shares else TreeNode
        self.components: tuple[TreeComponent, ...] = (*components,)
        self.others: tuple[TreeComponent, ...] = self.components[1:]
        self.root = TreeNode(None, Namespace(""), b"", b"", 0, 0)
        self.observers: tuple[TreeObserver, ...] = (*observers,)
        self._by_group = {component.name: component for component in components}
        self._keys_fall = any(component.evictor.keys_fall for component in components)
        self.walks = 0  # how often something was looked up or inserted; evictions and locks are not counted

    # -- finding -----------------------------------------------------------------------------------

    def walk(self, key: RadixKey, hits: int = 0, below: TreeNode | None = None) -> tuple[list[TreeNode], int]:
        """Nodes that hold the longest cached prefix of `key`, and its length in units; each counts `hits`.

        The node in which the prefix ends is split there. Where tenants share pages there may be two ways for
        a key: `below` is a node that the caller has locked, through which its way leads.
        """
        self.walks = tick = self.walks + 1
        path: list[TreeNode] = []
        at = 0
        if key.tenant and (self.shares or key.marks is not NO_MARKS):
            if self.shares:
                path, pages, beyond = mixed_path(key, self.page_size, self.root, below)
                if beyond:
                    path[-1] = self._split(path[-1], path[-1].num_pages - beyond)
            else:
                path, pages = named_path(key, self.page_size, self.root, below)
                path = self.cut(path, pages)
            at = pages * self.page_size * TOKEN_BYTES
            for node in path:
                node.last_access = tick
            if hits:  # a look-up counts none
                for node in path:
                    node.hit_count += hits
        else:
            extra = TOKEN_BYTES if key.namespace.is_bigram else 0
            stride = self.page_size * TOKEN_BYTES
            first = stride + extra
            end = len(key) // self.page_size * stride
            raw = key.tokens[: (end + extra) // TOKEN_BYTES].tobytes()
            # root_slot in place: the call would make a miss 3% slower.
            slot = key.namespace.seed + raw[:first]
            if key.tenant:
                slot = owner_key(key.tenant) + slot
            child = self.root.children.get(slot) if end else None
            while child is not None:
                if not raw.startswith(child.tokens, at):
                    child = self._split(child, child.common_pages(raw, at, stride, extra))
                child.last_access = tick
                child.hit_count += hits
                path.append(child)
                at += child.num_pages * stride
                child = child.children.get(raw[at : at + first]) if at < end else None
        if self._keys_fall:
            for component in self.components:
                component.evictor.touched(path)
        return path, at // TOKEN_BYTES

    def usable(self, path: list[TreeNode], pages: int, with_host: bool = False) -> list[TreeNode]:
        """The longest part of a path of `pages` pages at whose end every group can continue, `with_host` with
        the help of what is on the host.

        The node in which that part ends is split there.
        """
        if not self.others:
            return path
        also = self.lower.held(path) if with_host and self.lower is not None else {}
        valid = [c.valid_lengths(path, pages, also.get(c.name, NO_PAGES)) for c in self.others]
        return self.cut(path, longest(valid))

    def cut(self, path: list[TreeNode], left: int) -> list[TreeNode]:
        """The first `left` pages of a path. The node in which they end is split there."""
        for i, node in enumerate(path):
            if left < node.num_pages:
                return path[:i] + ([self._split(node, left)] if left else [])
            left -= node.num_pages
        return path

    def _split(self, node: TreeNode, pages: int) -> TreeNode:
        upper = node.split(pages, self.page_size)
        if self.others:
            upper.parts = {}
            for component in self.others:
                component.split(upper, node)
        if node.host is not None:
            assert self.lower is not None, "a host copy without a host tier"
            self.lower.divided(upper, node)
        return upper

    # -- growing -----------------------------------------------------------------------------------

    def append(
        self,
        parent: TreeNode,
        key: RadixKey,
        pages: Pages,
        start: int,
        priority: int,
        offers: Mapping[str, Pages],
        is_copy: bool = False,
    ) -> TreeNode:
        """A new leaf below `parent` for `pages[start:]`; `pages` hold the first pages of `key`.

        `offers` has the other groups' pages, by group name. `is_copy`: see TreeNode.
        """
        begin, end = start * self.page_size, len(pages) * self.page_size
        tokens = key[begin:end].tokens.tobytes()
        ids = pages[start:].astype(np.int32).tobytes()
        node = self._new_node(parent, key.namespace, tokens, ids, len(pages) - start, self.walks, key.tenant)
        node.priority = priority
        if is_copy:
            node.offers = COPY
            for component in self.components:
                component.evictor.expect_copies()
        if key.tenant and parent.permanently_private:
            node.offers |= FINAL
        parent.children[node.child_key(self.page_size)] = node
        parent.resident_children += 1
        if self.others:
            node.parts = {}
        for component in self.components:
            component.insert(node, start, offers.get(component.name, NO_PAGES))
        for observer in self.observers:
            observer.stored(node, StorageMedium.GPU)
        return node

    def append_host(self, parent: TreeNode, key: RadixKey, start: int, end: int) -> TreeNode:
        """A new leaf below `parent` for pages [start, end) of `key`, which are on the host alone: its copy is
        still empty."""
        begin, stop = start * self.page_size, end * self.page_size
        tokens = key[begin:stop].tokens.tobytes()
        node = self._new_node(parent, key.namespace, tokens, b"", end - start, self.walks, key.tenant)
        parent.children[node.child_key(self.page_size)] = node
        node.host = HostCopy()
        node.offers |= parent.offers & FINAL
        if self.others:
            node.parts = {}
        for component in self.others:
            component.insert(node, start, NO_PAGES)
        return node

    def restore(self, path: Sequence[TreeNode], pages: Pages) -> None:
        """Give the nodes of `path` that are not resident their pages of `pages`, which has one for each page
        of the path."""
        start = 0
        for node in path:
            end = start + node.num_pages
            if not node.page_ids:
                assert node.parent is not None, "the root is resident"
                node.page_ids = pages[start:end].astype(np.int32).tobytes()
                node.parent.resident_children += 1
                self.components[0].insert(node, start, NO_PAGES)
                for observer in self.observers:
                    observer.stored(node, StorageMedium.GPU)
            start = end

    # -- locks -------------------------------------------------------------------------------------

    def lock(self, node: TreeNode) -> None:
        """Each component locks its part of what ends at `node`. The root needs no lock."""
        if node is not self.root:
            for component in self.components:
                component.lock(node)

    def unlock(self, node: TreeNode) -> None:
        """Undo one `lock`. A leaf that became a tombstone under the lock is removed with the last one."""
        if node is not self.root:
            for component in self.components:
                component.unlock(node)
            self.settle(node)

    def settle(self, node: TreeNode) -> None:
        """Offer `node` for eviction if it is an unlocked leaf of the device now; if it is a tombstone, it
        gives way at once."""
        while not (node.lock_ref or node.resident_children or node is self.root):
            if not self.others or not any(component.is_tombstone(node) for component in self.others):
                self.components[0].evictor.offer(node)
                return
            node = self._give_way(node)

    # -- shrinking ---------------------------------------------------------------------------------

    def evict(self, group: str, pages: int, of: str | None = None) -> int:
        """Free at least `pages` pages of a group in policy order, or all that can be freed; returns how many.
        `of`: of this tenant's nodes alone.

        Of an inner node, or one whose path is locked, only this group's part is freed. An unlocked leaf gives
        way with all that it holds once its part alone does not suffice. A leaf has no child on the device.
        """
        component = self._by_group.get(group)
        if component is None:
            return 0
        evictor, before = component.evictor, component.evictable()
        pop: Callable[[Callable[[TreeNode], bool]], TreeNode | None] = evictor.pop
        if of is not None:
            assert isinstance(evictor, SharedEvictor), "nothing is known of tenants"
            pop = partial(evictor.pop_of, of)
        left = before - pages
        while (evictable := component.evictable()) > left:
            node = pop(component.may_evict)
            if node is None:
                break
            goes = component is self.components[0]  # of the primary group a leaf has nothing to give but all
            if node.offers & ALL_CHANCES and goes and of is None and not self._keys_fall:
                use_chance(node, self.walks)
                evictor.offer(node)
                continue
            if not goes:
                is_free_leaf = not node.resident_children and not node.lock_ref
                if self.lower is not None:
                    self.lower.shrinking(node)
                component.shrink(node, evictable - left, is_free_leaf)
                goes = is_free_leaf and component.evictable() > left
            if goes:
                self.settle(self._give_way(node))
            elif component.may_evict(node):
                component.evictor.offer(node)
        return before - component.evictable()

    def _give_way(self, node: TreeNode) -> TreeNode:
        """Free what an unlocked leaf holds on the device, and remove it unless it stays on the host.

        Returns its parent, which may be a tombstone.
        """
        parent = node.parent
        assert parent is not None, "the root never gives way"
        stays = self.lower is not None and self.lower.keeps(node)
        self.leave_device(node)
        if not stays:
            self.remove(node)
        return parent

    def leave_device(self, node: TreeNode) -> None:
        """Free what an unlocked node without resident children holds on the device. It stays in the tree."""
        assert node.parent is not None, "the root stays"
        for observer in self.observers:
            observer.removed(node, StorageMedium.GPU)
        for component in self.components:
            component.free(node)
        node.page_ids = b""
        node.parent.resident_children -= 1

    def remove(self, node: TreeNode) -> None:
        """Unlink a node that is not resident, with all that is below it, on the host."""
        if self.lower is not None:
            for one in (*node.descendants(), node):
                self.lower.dropped(one)
        assert node.parent is not None, "the root is never removed"
        del node.parent.children[node.child_key(self.page_size)]

    # -- looking -----------------------------------------------------------------------------------

    def nodes(self) -> Iterator[TreeNode]:
        """Every node but the root, parents before children."""
        return self.root.descendants()

    def evictable(self, group: str) -> int:
        """Pages of a group that `evict` can free."""
        component = self._by_group.get(group)
        return 0 if component is None else component.evictable()

    def protected(self, group: str) -> int:
        """Pages of a group under a lock."""
        component = self._by_group.get(group)
        return 0 if component is None else component.protected()

    def all_pages(self, group: str) -> Pages:
        """Every cached page (or slot) of a group, in no order."""
        component = self._by_group.get(group)
        return NO_PAGES if component is None else component.all_pages(self.nodes())

    def check(self, count: Callable[[str, Pages], Iterator[None]]) -> Iterator[None]:
        """Assert that the sizes are what counting all nodes gives, that every group's rules hold, and that no
        unlocked leaf is a tombstone. `count` is given every cached page of each group.

        Yields between slices of the tree, in which it must not change.
        """
        tallies = {component: Tally() for component in self.components}
        owned: dict[str, Counter[str]] = {c.name: Counter() for c in self.components if c.tenants is not None}
        for nodes in in_slices(self.nodes()):
            for component, tally in tallies.items():
                component.tally(nodes, tally)
                for node in nodes if component.tenants is not None else ():
                    owned[component.name][node.tenant] += len(component.all_pages([node]))
                yield from count(component.name, component.all_pages(nodes))
            for node in nodes:
                resident = sum(child.is_resident for child in node.children.values())
                assert resident == node.resident_children, "resident children are miscounted"
                assert node.is_resident or not resident, "a node is resident and its parent is not"
                assert node.is_resident or node.host is not None, "a node is on no tier"
                assert node.tenant or not node.permanently_private, "a public node is private for ever"
                final = all(child.permanently_private for child in node.children.values())
                assert final or not node.permanently_private, "below a page that is private for ever"
            leaves = [n for n in nodes if n.is_resident and not n.resident_children and not n.lock_ref]
            for component in self.others:
                assert not any(map(component.is_tombstone, leaves)), f"a leaf is a {component.name} tombstone"
            yield
        for component, tally in tallies.items():
            name, protected = component.name, component.protected()
            assert tally.locked == protected, f"{tally.locked} locked {name} pages, not {protected}"
            unlocked, evictable = tally.kept - tally.locked, component.evictable()
            assert unlocked == evictable, f"{unlocked} evictable {name} pages, not {evictable}"
            if component.tenants is not None:
                assert +owned[name] == component.tenants.held, f"{name} pages are miscounted by tenant"


def resident_part(path: list[TreeNode]) -> tuple[list[TreeNode], int]:
    """The part of a path that is on the device, and its pages."""
    pages = 0
    for i, node in enumerate(path):
        if not node.page_ids:
            return path[:i], pages
        pages += node.num_pages
    return path, pages


def evict_all(tree: RadixTree) -> int:
    """Evict all that no lock keeps, of every group. Returns how many pages of the primary group."""
    freed = [tree.evict(component.name, component.evictable()) for component in tree.components]
    return freed[0] if freed else 0


def pages_by_tenant(tree: RadixTree) -> Mapping[str, int]:
    """Pages of the primary group on the tree, where they are counted by tenant; not a copy."""
    counted = tree.components[0].tenants if tree.components else None
    return {} if counted is None else counted.held


def trim(tree: RadixTree, tenant: str) -> None:
    """Evict of the tenant's own pages what it has beyond its max_share, as far as no lock keeps it."""
    for component in tree.components:
        excess = 0 if component.tenants is None else component.tenants.excess(tenant)
        if excess:
            tree.evict(component.name, excess, tenant)
