"""StateComponent: a match is valid exactly where a state was saved.

A state is the state after the last token of a node: `parts["state"]` is its slot, 0 where there is none. It
exists only where a forward ended, so this group asks for forwards to end where others will look for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvcache.allocator import Pages
from kvcache.base_prefix_cache import MatchResult
from kvcache.components.base import Lengths, TreeComponent
from kvcache.eviction import Evictor
from kvcache.request import CachedRequest
from kvcache.state_slots import StateSlotPool
from kvcache.tree_node import TreeNode


class StateComponent(TreeComponent):
    """Keeps a state slot on some nodes and counts `node.mamba_lock`, locks that end there; sizes: slots."""

    name = "state"

    def __init__(self, states: StateSlotPool, page_size: int, policy: str) -> None:
        self.evictor = Evictor(policy, 4)
        self._states = states
        self._page_size = page_size
        self._kept = 0
        self._protected = 0

    @staticmethod
    def _slot(node: TreeNode) -> int:
        slot: int = node.parts["state"]
        return slot

    # -- matching ----------------------------------------------------------------------------------

    def valid_lengths(self, path: Sequence[TreeNode], pages: int) -> Lengths:
        """The ends of nodes with a state."""
        valid = np.zeros(pages + 1, bool)
        valid[0] = True
        end = 0
        for node in path:
            end += node.num_pages
            valid[end] = self._slot(node) != 0
        return valid

    def gather(self, path: Sequence[TreeNode]) -> dict[str, Any]:
        """`state_slot`."""
        return {"state_slot": self._slot(path[-1])}

    def cut_points(self, req: CachedRequest, total: int) -> Iterable[int]:
        """The last page border before the end, where a repeat will look; and where other prompts part."""
        branching = req.state_hold.branching_len if req.state_hold is not None else 0
        repeat = total - (2 if req.namespace.is_bigram else 1)  # units that match all but the last token
        return (repeat // self._page_size * self._page_size, branching)

    # -- growing -----------------------------------------------------------------------------------

    def leaf_lengths(self, offer: Any, pages: int) -> Lengths:
        """The end of the key, if a state is offered."""
        lengths = np.zeros(pages + 1, bool)
        lengths[pages] = bool(offer)
        return lengths

    def revive(self, path: Sequence[TreeNode], offer: Any, is_whole: bool) -> None:
        """Fill the node that ends where the key ends."""
        if offer and is_whole and not self._slot(path[-1]):
            self._keep(path[-1], offer)

    def insert(self, node: TreeNode, start: int, offer: Any) -> None:
        """See the base."""
        del start
        node.parts[self.name] = 0
        if offer:
            self._keep(node, offer)

    def _keep(self, node: TreeNode, slot: int) -> None:
        node.parts[self.name] = slot
        self._kept += 1
        if node.mamba_lock:
            self._protected += 1
        else:
            self.evictor.offer(node)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """The state stays at the end."""
        del lower
        upper.parts[self.name] = 0

    # -- locks -------------------------------------------------------------------------------------

    def lock(self, node: TreeNode) -> None:
        """Protect the one state, if there is one, or comes to be."""
        if not node.mamba_lock and self._slot(node):
            self._protected += 1
        node.mamba_lock += 1

    def unlock(self, node: TreeNode) -> None:
        """The inverse."""
        node.mamba_lock -= 1
        assert node.mamba_lock >= 0, "a state is unlocked more often than locked"
        if not node.mamba_lock and self._slot(node):
            self._protected -= 1
            self.evictor.offer(node)

    # -- shrinking ---------------------------------------------------------------------------------

    def is_tombstone(self, node: TreeNode) -> bool:
        """It has no state."""
        return not self._slot(node)

    def may_evict(self, node: TreeNode) -> bool:
        """A state that nobody locks."""
        return bool(self._slot(node)) and not node.mamba_lock

    def shrink(self, node: TreeNode, wanted: int, is_free_leaf: bool) -> None:
        """Drop the state, unless an unlocked leaf would be left without."""
        del wanted
        if not is_free_leaf:
            self._drop(node)

    def free(self, node: TreeNode) -> None:
        """Its state, if any."""
        assert not node.mamba_lock, "a locked state on an unlocked node"
        self.evictor.withdraw(node)
        if self._slot(node):
            self._drop(node)

    def _drop(self, node: TreeNode) -> None:
        self._states.allocator.free_now(np.array([self._slot(node)], np.int32))
        node.parts[self.name] = 0
        self._kept -= 1

    def evictable_size(self) -> int:
        """States that nobody locks."""
        return self._kept - self._protected

    # -- requests ----------------------------------------------------------------------------------

    def _saved(self, req: CachedRequest, length: int) -> tuple[int, int]:
        """(length, slot) of the longest state, of at most `length` tokens, that the request can give."""
        hold = req.state_hold
        states = hold.states() if hold is not None else []
        fits = (n for n in states if n[0] <= length and n[0] % self._page_size == 0)
        return next(fits, (0, 0))

    def insertable(self, req: CachedRequest, length: int) -> int:
        """Up to where a state of the request was saved."""
        return self._saved(req, length)[0]

    def offer(self, req: CachedRequest, length: int, ends: bool) -> Any:
        """That state. A request that goes on gets another slot first, or gives nothing."""
        hold = req.state_hold
        assert hold is not None, "the request holds no states"
        if not ends:
            spare = self._states.alloc(1)
            if spare is None:
                return None
            hold.private += spare
        return self._saved(req, length)[1]

    def adopt(self, req: CachedRequest, cached: MatchResult) -> None:
        """A slot that the tree took is no longer the request's; one that it did not need is not replaced."""
        hold = req.state_hold
        assert hold is not None, "the request holds no states"
        taken = cached.state_slot in hold.private
        spare = hold.private[PAIR:]
        if taken:
            hold.give(cached.state_slot)
        elif spare:
            self._states.free(spare)
            del hold.private[PAIR:]

    # -- looking -----------------------------------------------------------------------------------

    def check(self, nodes: Sequence[TreeNode]) -> None:
        """As the base says; and a node with a state lock has a full lock."""
        kept = [node for node in nodes if self._slot(node)]
        assert len(kept) == self._kept, "cached states are miscounted"
        locked = sum(node.mamba_lock > 0 for node in kept)
        assert locked == self._protected, "locked states are miscounted"
        for node in nodes:
            assert node.lock_ref >= node.mamba_lock, "mamba_lock > 0, full_lock == 0"

    def all_pages(self, nodes: Iterable[TreeNode]) -> Pages:
        """Every slot kept."""
        return np.array([slot for node in nodes if (slot := self._slot(node))], np.int32)

    def held(self, node: TreeNode) -> int:
        """1 if there is a state."""
        return int(self._slot(node) != 0)

    def describe(self, node: TreeNode) -> str:
        """The slot, and its locks."""
        if not self._slot(node):
            return "no state"
        return f"state={self._slot(node)}" + (f" (locked {node.mamba_lock}x)" if node.mamba_lock else "")


PAIR = 2
"""Slots that a request owns while it runs."""
