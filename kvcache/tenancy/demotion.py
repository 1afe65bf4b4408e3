"""Demotion: public pages that one tenant seems to guess its way along stop being public.

Who wants to know how others' prompts go on asks for many continuations of what is public, each a little
longer than what is cached, and looks which of them was answered sooner. So per tenant and epoch those
requests are counted whose match ends on promoted pages that the tenant has not computed itself, and which
compute less than a few pages more. Above `sharing_burst` of them, the promoted pages where these matches
ended, and the public ones below, are demoted at the end of the epoch. Pages that 2K tenants have used lately
stay: they are no secret, and one tenant must not take from all what all use.

A demoted node, and all below it, belongs to owners whom no request can name, so no look-up finds it; requests
that hold it go on, and nothing is added below. It is removed as soon as nothing locks it. Its place may not
become public again for some epochs. What storage has of it under public names is not read until the place is
public again.

Pages that were public from the start (requests without a tenant) are not demoted, but those below a demoted
node are.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from kvcache.mixed_path import mixed_path
from kvcache.radix_key import RadixKey
from kvcache.radix_tree import RadixTree
from kvcache.tenancy.usage import NodeUsage
from kvcache.tenancy.visibility import discard, is_in_tree, is_settled, unpublish
from kvcache.tree_node import TreeNode
from wire.page_hash import PageDigest, page_digests

GUESS_PAGES = 4
"""A request that computes fewer pages than these beyond its match may be a guess."""
BARRED_EPOCHS = 10
"""For so many epochs the place of a demoted node does not become public again."""
_MOST_BARRED = 4096  # places; the oldest is forgotten first


class Demotion:
    """One tree's. All methods are called on the tree's thread."""

    def __init__(self, tree: RadixTree, usage: NodeUsage, burst: int) -> None:
        """`burst`: so many guesses of one tenant in an epoch are no burst yet; 0: nothing is demoted."""
        self.demoted_pages = 0  # since the start
        self._tree = tree
        self._usage = usage
        self._burst = burst
        self._guesses: dict[str, list[TreeNode]] = {}  # where they ended in this epoch, by tenant
        self._due: list[TreeNode] = []  # to be demoted when no move on a lower tier uses them
        self._leaving: list[TreeNode] = []  # demoted, and still in the tree
        self._owners = f"demoted:{secrets.token_hex(16)}:"  # the names of owners begin so, and no tenant's
        self._last_owner = 0
        # Pages with which something demoted begins, or ended that was evicted before; until which epoch.
        self._barred: OrderedDict[PageDigest, int] = OrderedDict()

    def admitted(self, tenant: str, last: TreeNode, more_tokens: int) -> None:
        """A request has locked the path of `last`, all that is cached of it, and computes so much more."""
        is_guess = more_tokens < GUESS_PAGES * self._tree.page_size
        if self._burst and is_guess and last.founders and tenant not in last.founders:
            self._guesses.setdefault(tenant, []).append(last)

    def holds(self, node: TreeNode) -> bool:
        """Whether the node was demoted."""
        return node.tenant.startswith(self._owners)

    def is_barred(self, page: PageDigest) -> bool:
        """Whether what begins with this page may not become public now."""
        return self._barred.get(page, 0) > self._usage.epoch

    def promoted(self, node: TreeNode) -> None:
        """`node` has become public."""
        for page in node.page_digests(self._tree.page_size) if self._barred else ():
            self._barred.pop(page, None)

    def withholds(self, key: RadixKey) -> bool:
        """Whether some of the key's pages were demoted, and have not become public again."""
        if not self._barred:
            return False
        size, namespace = self._tree.page_size, key.namespace
        pages = page_digests(namespace.seed, key.tokens.tobytes(), size, namespace.is_bigram)
        return not self._barred.keys().isdisjoint(pages)

    def end_epoch(self) -> None:
        """Demote what bursts of this epoch have touched."""
        by_tenant, self._guesses = self._guesses, {}
        for guesses in by_tenant.values():
            self._due += guesses if len(guesses) > self._burst else ()
        self.go_on()

    def go_on(self) -> None:
        """Demote what could not be before, and remove what was demoted and is free now."""
        due, self._due = self._due, []
        for place, touched in {self._place(one): one for one in due}.items():
            node = self._found(touched)
            if node is None:  # evicted meanwhile; others' copies must not become public in its place
                self._bar(place)
            else:
                for top in list(self._promoted(node)):
                    self._demote(top)
        self._remove_unlocked()

    def _place(self, node: TreeNode) -> PageDigest:
        """Where the node ends; also of one that was evicted, which keeps its tokens and its path."""
        return node.page_digests(self._tree.page_size)[-1]

    def _found(self, node: TreeNode) -> TreeNode | None:
        """The node, or if it was evicted what is public in its place now: it may have come from storage or
        another worker again."""
        tree = self._tree
        if is_in_tree(tree, node):
            return node
        path = node.path()
        tokens = np.concatenate(
            [*(step.token_array()[: step.num_tokens] for step in path), node.token_array()[node.num_tokens :]]
        )
        key = RadixKey(tokens, node.namespace)
        found, pages, _ = mixed_path(key, tree.page_size, tree.root, None)
        return tree.cut(found, pages)[-1] if pages * tree.page_size == len(key) else None

    def _promoted(self, node: TreeNode) -> Iterator[TreeNode]:
        """The highest public nodes, `node` or below, that were promoted and that few use."""
        stack = [node]
        while stack:
            one = stack.pop()
            if one.tenant:
                continue
            used = self._usage.of(one)
            if one.founders and max(used.u_cnt_l, used.u_pre) < self._usage.most_users:
                yield one
            else:
                stack.extend(one.children.values())

    def _demote(self, top: TreeNode) -> None:
        nodes = [top, *top.descendants()]
        if not all(map(is_settled, nodes)):
            self._due.append(top)
            return
        place = top.page_digests(self._tree.page_size)[0]
        self.demoted_pages += sum(node.num_pages for node in nodes if not node.tenant)
        unpublish(self._tree, top, self._new_owner)
        self._leaving.append(top)
        self._bar(place)

    def _bar(self, place: PageDigest) -> None:
        self._barred[place] = self._usage.epoch + 1 + BARRED_EPOCHS
        self._barred.move_to_end(place)
        if len(self._barred) > _MOST_BARRED:
            self._barred.popitem(last=False)

    def _new_owner(self) -> str:
        self._last_owner += 1
        return f"{self._owners}{self._last_owner}"

    def _remove_unlocked(self) -> None:
        tree = self._tree
        for top in self._leaving:
            for node in reversed([top, *top.descendants()]):
                is_free = not (node.children or node.lock_ref) and is_settled(node)
                if is_free and is_in_tree(tree, node):
                    discard(tree, node)
        self._leaving = [top for top in self._leaving if is_in_tree(tree, top)]
