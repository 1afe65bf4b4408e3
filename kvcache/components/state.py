"""The state group on the tree: a match is valid exactly where a state was saved.

A state is the state after the last token of a node. It exists only where a forward ended, so this group asks
for forwards to end where other requests will look for a state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvcache.allocator import NO_PAGES, BaseTokenToKVPoolAllocator, Pages
from kvcache.components.base import Lengths, PartReport, Tally, TreeComponent
from kvcache.components.holdings import GroupHoldings
from kvcache.eviction import Evictor
from kvcache.group_allocator import GroupAllocator
from kvcache.request import STATE_PAIR, CachedRequest, StateHold, state_slot
from kvcache.shares.evictor import SharedEvictor
from kvcache.shares.pages import TenantPages
from kvcache.tree_node import TreeNode


@dataclass(slots=True)
class SavedState:
    """A node's part: the slot of the state after its last token, and how many locks end at the node."""

    slot: int = 0  # 0: there is no state
    locks: int = 0


def _part(node: TreeNode) -> SavedState:
    part: SavedState = node.parts["state"]
    return part


class StateComponent(TreeComponent):
    """Keeps a SavedState on every node; an offer is one slot, 0 or nothing."""

    name = "state"
    tells_ends = True

    def __init__(
        self, allocator: BaseTokenToKVPoolAllocator, policy: str, tenants: TenantPages | None = None
    ) -> None:
        self.tenants = tenants
        self.evictor = Evictor(policy, 4) if tenants is None else SharedEvictor(policy, 4, tenants)
        self._allocator = allocator
        self._kept = 0
        self._protected = 0

    # -- matching ----------------------------------------------------------------------------------

    def valid_lengths(self, path: Sequence[TreeNode], pages: int, also: Pages = NO_PAGES) -> Lengths:
        """The ends of nodes with a state."""
        valid = np.zeros(pages + 1, bool)
        valid[0] = True
        end = 0
        for i, node in enumerate(path):
            end += node.num_pages
            valid[end] = _part(node).slot != 0 or (i < len(also) and also[i] != 0)
        return valid

    def gather(self, path: Sequence[TreeNode]) -> Pages:
        """The slot of the state after the path; 0 where there is none."""
        return np.array([_part(path[-1]).slot], np.int32)

    # -- growing -----------------------------------------------------------------------------------

    def leaf_lengths(self, offer: Pages, pages: int) -> Lengths:
        """The end of the key, if a state is offered."""
        lengths = np.zeros(pages + 1, bool)
        lengths[pages] = state_slot(offer) != 0
        return lengths

    def revive(self, path: Sequence[TreeNode], offer: Pages, is_whole: bool) -> None:
        """Give the node at the end of the key the state that it lacks."""
        slot = state_slot(offer)
        if slot and is_whole and not _part(path[-1]).slot:
            self._keep(path[-1], slot)

    def insert(self, node: TreeNode, start: int, offer: Pages) -> None:
        """The new leaf ends where the offered state does."""
        del start
        node.parts[self.name] = SavedState()
        slot = state_slot(offer)
        if slot:
            self._keep(node, slot)

    def _keep(self, node: TreeNode, slot: int) -> None:
        part = _part(node)
        part.slot = slot
        self._kept += 1
        self.count(node, 1)
        if part.locks:
            self._protected += 1
        else:
            self.evictor.offer(node)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """The state stays at the end, on `lower`."""
        del lower
        upper.parts[self.name] = SavedState()

    def hand_over(self, copy: TreeNode, kept: TreeNode) -> None:
        """The state at the end, if `kept` has none."""
        slot = _part(copy).slot
        if slot and not _part(kept).slot:
            _part(copy).slot = 0
            self._kept -= 1
            self.count(copy, -1)
            self._keep(kept, slot)

    # -- locks -------------------------------------------------------------------------------------

    def lock(self, node: TreeNode) -> None:
        """Protect the state at this node, also one that is saved there later."""
        part = _part(node)
        if not part.locks and part.slot:
            self._protected += 1
        part.locks += 1

    def unlock(self, node: TreeNode) -> None:
        """A state without locks may be evicted."""
        part = _part(node)
        part.locks -= 1
        assert part.locks >= 0, "a state is unlocked more often than locked"
        if not part.locks and part.slot:
            self._protected -= 1
            self.evictor.offer(node)

    # -- shrinking ---------------------------------------------------------------------------------

    def is_tombstone(self, node: TreeNode) -> bool:
        """The node has no state."""
        return not _part(node).slot

    def may_evict(self, node: TreeNode) -> bool:
        """The node has a state that no request locks."""
        part = _part(node)
        return bool(part.slot) and not part.locks

    def shrink(self, node: TreeNode, wanted: int, is_free_leaf: bool) -> None:
        """Free the state, unless the node is an unlocked leaf, which would then be a tombstone."""
        del wanted
        if not is_free_leaf:
            self._drop(node)

    def free(self, node: TreeNode) -> None:
        """Free the node's state, if it has one."""
        part = _part(node)
        assert not part.locks, "a locked state on an unlocked node"
        self.evictor.withdraw(node)
        if part.slot:
            self._drop(node)

    def _drop(self, node: TreeNode) -> None:
        part = _part(node)
        self._allocator.free_evicted(np.array([part.slot], np.int32))
        part.slot = 0
        self._kept -= 1
        self.count(node, -1)

    # -- looking -----------------------------------------------------------------------------------

    def evictable(self) -> int:
        """States that no request locks."""
        return self._kept - self._protected

    def protected(self) -> int:
        """States that a request locks."""
        return self._protected

    def tally(self, nodes: Sequence[TreeNode], tally: Tally) -> None:
        """A node with a state lock has a lock of the primary group."""
        for node in nodes:
            part = _part(node)
            if part.slot:
                tally.kept += 1
                tally.locked += part.locks > 0
            assert node.lock_ref >= part.locks, "a state lock on a node without a lock"

    def report(self, node: TreeNode) -> PartReport:
        """1 if there is a state; its slot, and its locks."""
        part = _part(node)
        if not part.slot:
            return PartReport(0, "no state")
        return PartReport(1, f"state={part.slot}" + (f" (locked {part.locks}x)" if part.locks else ""))


class StateHoldings(GroupHoldings):
    """The states of requests: their StateHolds."""

    name = "state"

    def __init__(self, slots: GroupAllocator, page_size: int) -> None:
        self._slots = slots
        self._page_size = page_size

    def _saved(self, req: CachedRequest, length: int) -> tuple[int, int]:
        """(length, slot) of the longest state, of at most `length` tokens, that the request can give."""
        states = req.state_hold.states() if req.state_hold is not None else []
        fits = (n for n in states if n[0] <= length and n[0] % self._page_size == 0)
        return next(fits, (0, 0))

    @staticmethod
    def _hold(req: CachedRequest) -> StateHold:
        assert req.state_hold is not None, "the request holds no states"
        return req.state_hold

    def insertable(self, req: CachedRequest, length: int) -> int:
        """Up to the last state that the request has saved."""
        return self._saved(req, length)[0]

    def make_room(self, ends: bool) -> None:
        """For the slot that a request which continues allocates."""
        if not ends:
            self._slots.make_room(1)

    def offer(self, req: CachedRequest, length: int, ends: bool) -> Pages | None:
        """That state. A request that continues allocates another slot first; without one it offers
        nothing."""
        hold = self._hold(req)
        if not ends:
            spare = self._slots.alloc(1)
            if spare is None:
                return None
            hold.private += spare.tolist()
        return np.array([self._saved(req, length)[1]], np.int32)

    def adopt(self, req: CachedRequest, cached: Pages) -> None:
        """The slot that the tree took is no longer the request's. If the tree took none, the spare one is
        freed."""
        hold, slot = self._hold(req), state_slot(cached)
        spare = hold.private[STATE_PAIR:]
        if slot in hold.private:
            hold.give(slot)
        elif spare:
            self._slots.free(spare)
            del hold.private[STATE_PAIR:]

    def release(self, req: CachedRequest) -> None:
        """Free the request's own slots."""
        if req.state_hold is not None:
            self._slots.free(req.state_hold.private)
            req.state_hold = None

    def cut_points(self, req: CachedRequest, total: int) -> Iterable[int]:
        """The last page border before the end, where a repeat of the prompt will look, and the point where
        the prompt parts from what is cached."""
        branching = req.state_hold.branching_len if req.state_hold is not None else 0
        repeat = total - (2 if req.namespace.is_bigram else 1)  # units that match all but the last token
        return (repeat // self._page_size * self._page_size, branching)
