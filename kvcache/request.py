"""What the cache needs of a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvcache.radix_key import Namespace
from kvcache.tree_node import TreeNode
from wire.request import PromptMarks

GroupPages = dict[str, npt.NDArray[np.integer]]
"""Page ids (of a state group: slots) by group name. An absent group means nothing of it."""

STATE_PAIR = 2
"""State slots that every request owns while it runs: one is read while the other is written."""

MOVING = -1
"""A `live_len`: decode changes the state in place, so its length is not kept."""


def state_slot(part: npt.NDArray[np.integer]) -> int:
    """The slot in a state group's part of a match or an offer; 0 if there is none."""
    return int(part[0]) if len(part) else 0


@dataclass(slots=True)
class StateHold:
    """The state slots of one request: a ping-pong pair of its own, and which slot holds what.

    A forward reads one slot and writes another (or the same): a state is kept by not writing to its slot.
    `live` may be a slot of the tree, under the request's lock, until the first forward has written another
    one. Call `prefill` or `decode` once for each launched forward, in launch order.
    """

    private: list[int]  # slots that this request owns; two
    live: int = 0  # the slot with the state that the next forward starts from; 0: none, the sequence starts
    live_len: int = 0  # how many tokens that state has seen, or MOVING
    tracked: int = 0  # a slot of `private` that keeps an earlier state, worth caching; 0: none
    tracked_len: int = 0
    branching_len: int = 0  # MatchResult.branching_len: where others' prompts part from this one

    def prefill(self, end: int) -> tuple[int, int]:
        """(slot to read, slot to write) of a forward that computes this sequence up to length `end`."""
        read = self.live
        write = self._switch()
        self.live, self.live_len = write, end
        return read, write

    def decode(self, length: int, checkpoint: bool = False) -> tuple[int, int]:
        """(slot to read, slot to write) of a forward for the token at position `length`.

        They are the same slot, unless the state is not the request's own or `checkpoint` asks to keep it.
        """
        read = self.live
        if checkpoint:
            self.live_len = length
        if checkpoint or read not in self.private:
            self.live = self._switch()
        self.live_len = MOVING
        return read, self.live

    def _switch(self) -> int:
        """The slot to write next. The live one is not written, and is tracked if it is the request's own."""
        owned = self.live in self.private
        write = next(s for s in self.private if s != self.live and (owned or s != self.tracked))
        if owned:
            self.tracked, self.tracked_len = self.live, self.live_len
        return write

    def states(self) -> list[tuple[int, int]]:
        """(length, slot) of every state that the request owns and that nothing writes to, longest first."""
        held = ((self.live_len, self.live), (self.tracked_len, self.tracked))
        return sorted(((n, slot) for n, slot in held if n > 0 and slot in self.private), reverse=True)

    def give(self, slot: int) -> None:
        """The tree took `slot`. If it is the live one, it stays live, under the request's lock."""
        self.private.remove(slot)
        if self.tracked == slot:
            self.tracked = self.tracked_len = 0


class CachedRequest(Protocol):
    """A request with a place in memory. Lengths are tokens:

    0 .. cache_protected_len .. kv_committed_len .. kv_allocated_len
         in the tree, locked    KV is valid         has slots

    Its pages of a window group are in the SWATokenToKVPoolAllocator, by row.
    """

    req_pool_idx: int | None
    kv_committed_len: int
    kv_allocated_len: int
    prefix_indices: npt.NDArray[np.int64]  # slots whose KV the next forward need not compute
    cache_protected_len: int  # whole pages
    last_node: TreeNode | None  # locked on behalf of this request
    state_hold: StateHold | None  # None where the model has no state group
    namespace: Namespace
    marks: PromptMarks  # which of its pages are public, and which stay private

    @property
    def tenant_key(self) -> str:
        """Whose its private pages are; "": all of its pages are everybody's."""
        ...

    @property
    def priority(self) -> int: ...
    @property
    def fill_ids(self) -> npt.NDArray[np.int32]:
        """Prompt and outputs so far."""
        ...
