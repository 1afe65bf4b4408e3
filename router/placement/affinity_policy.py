"""Policy `prefix-affinity`: follows prefixes without any event, by remembering its own choices.

What a router of workers that publish nothing can do, and the baseline that `kv` is measured against. Each
worker is taken to hold what was sent to it last, as much as its memory has room for: an approximate prefix
tree. A prompt follows the longest match when that is more than half of it, to the least loaded of those that
have it; it leaves the match when that worker's load exceeds the smallest by more than the objective
(weights.queue_objective prefill tokens, weights.requests_objective decode requests). Else it goes to the
least loaded. P and D are picked apart, each by its own tree.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from router.options import PolicyWeights
from router.placement.fleet import Floats
from router.placement.policy import Ask, Picked, Policy, RoleCandidates

_FOLLOWED = 0.5  # of the prompt: a match must be longer


@dataclass(slots=True)
class _Holder:
    """What one worker is taken to hold: page hashes, the one used longest ago first."""

    bit: int
    pages: OrderedDict[int, None] = field(default_factory=OrderedDict)


class PrefixTrees:
    """The approximate prefix trees of one role's workers.

    A page hash names its whole prefix, so a tree is a set of hashes. A prompt's pages are used last page
    first; so a page is never older than what follows it, eviction takes leaves, and every set stays closed
    under prefixes. Therefore the longest match is found by bisection, in one table for all workers.
    """

    def __init__(self) -> None:
        self._workers: dict[str, _Holder] = {}
        self._holders: dict[int, int] = {}  # page hash -> mask of the workers' bits

    def __len__(self) -> int:
        """Different pages known."""
        return len(self._holders)

    def longest(self, hashes: list[int]) -> tuple[int, int]:
        """Leading pages that some worker holds, and the mask of the workers that hold all of them."""
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in self._holders:
                low = middle
            else:
                high = middle - 1
        return low, self._holders[hashes[low - 1]] if low else 0

    def held(self, worker: str, hashes: list[int]) -> int:
        """Leading pages that this worker holds."""
        holder = self._workers.get(worker)
        if holder is None:
            return 0
        return next((n for n, page in enumerate(hashes) if page not in holder.pages), len(hashes))

    def holds(self, worker: str, mask: int) -> bool:
        """The worker's bit is in the mask."""
        holder = self._workers.get(worker)
        return holder is not None and bool(mask & holder.bit)

    def add(self, worker: str, hashes: list[int], capacity: int) -> None:
        """The worker holds these pages now, at the cost of its oldest beyond `capacity` pages."""
        holder = self._workers.get(worker)
        if holder is None:
            holder = self._workers[worker] = _Holder(self._free_bit())
        pages = holder.pages
        for page in reversed(hashes):
            if page in pages:
                pages.move_to_end(page)
            else:
                pages[page] = None
                self._holders[page] = self._holders.get(page, 0) | holder.bit
        while len(pages) > capacity:
            self._take(pages.popitem(last=False)[0], holder.bit)

    def forget(self, worker: str) -> None:
        """The worker holds nothing."""
        holder = self._workers.pop(worker, None)
        if holder is not None:
            for page in holder.pages:
                self._take(page, holder.bit)

    def _take(self, page: int, bit: int) -> None:
        left = self._holders[page] & ~bit
        if left:
            self._holders[page] = left
        else:
            del self._holders[page]

    def _free_bit(self) -> int:
        used = 0
        for holder in self._workers.values():
            used |= holder.bit
        return ~used & (used + 1)


class PrefixAffinity(Policy):
    """See the module."""

    def __init__(self, weights: PolicyWeights, alone_tokens: int, chance: random.Random) -> None:
        super().__init__(weights, alone_tokens, chance)
        self.prefill_trees = PrefixTrees()
        self.decode_trees = PrefixTrees()

    def pick(self, ask: Ask, prefill: RoleCandidates, decode: RoleCandidates) -> Picked:
        """See Policy."""
        hashes: list[int] = ask.hashes.tolist()
        weights = self.weights
        d = self._follow(
            self.decode_trees, ask, hashes, decode, decode.rows.requests, weights.requests_objective
        )
        held = self.decode_trees.held(decode.rows.names[d], hashes) * decode.page_tokens
        if len(prefill.rows) == 0 or max(1, ask.prompt_tokens - held) <= self.alone_tokens:
            return Picked(d, None)
        p = self._follow(
            self.prefill_trees, ask, hashes, prefill, prefill.rows.queued, weights.queue_objective
        )
        return Picked(d, p)

    def costs(self, ask: Ask, prefill: RoleCandidates, decode: RoleCandidates) -> dict[str, Floats]:  # noqa: ARG002
        """See Policy."""
        return {"decode": decode.rows.requests, "prefill": prefill.rows.queued}

    def placed(self, ask: Ask, picked: Picked, prefill: RoleCandidates, decode: RoleCandidates) -> None:
        """See Policy."""
        hashes: list[int] = ask.hashes.tolist()
        sides = [(self.decode_trees, decode, picked.decode)]
        if picked.prefill is not None:
            sides.append((self.prefill_trees, prefill, picked.prefill))
        for trees, side, row in sides:
            capacity = int(side.rows.capacity[row]) // max(1, side.page_tokens)
            trees.add(side.rows.names[row], hashes, capacity)

    def forget(self, worker: str) -> None:
        """See Policy."""
        self.prefill_trees.forget(worker)
        self.decode_trees.forget(worker)

    def _follow(
        self,
        trees: PrefixTrees,
        ask: Ask,
        hashes: list[int],
        side: RoleCandidates,
        load: Floats,
        objective: float,
    ) -> int:
        """The row of one role's worker."""
        pages, mask = trees.longest(hashes)
        if pages * side.page_tokens <= _FOLLOWED * ask.prompt_tokens:
            return self.cheapest(load)
        rows = [row for row, name in enumerate(side.rows.names) if trees.holds(name, mask)]
        if not rows:  # its holders are draining, or to be avoided
            return self.cheapest(load)
        row = rows[self.cheapest(load[np.array(rows)])]
        return row if load[row] - load.min() <= objective else self.cheapest(load)
