"""Policy `prefix-affinity`: follows prefixes without any event, by remembering its own choices.

This is the policy for workers that publish no events, and the baseline that `kv` is measured against. Each
worker is assumed to hold what was sent to it last, as much as its memory has room for: an approximate prefix
tree. If the longest match is more than half of the prompt, the prompt goes to the least loaded worker that
has it, unless that worker's load exceeds the smallest load by more than the objective
(weights.queue_objective prefill tokens, weights.requests_objective decode requests). Otherwise it goes to the
least loaded worker. P and D are chosen separately, each by its own tree.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from router.placement.fleet_table import Floats
from router.placement.peer_fetch import PeerFetch
from router.placement.policy import Choice, PlacementRequest, Policy, RoleCandidates
from router.placement_options import PolicyWeights

_FOLLOWED = 0.5  # of the prompt: a match must be longer


@dataclass(slots=True)
class _Holder:
    """What one worker is assumed to hold: page hashes, least recently used first."""

    bit: int
    pages: OrderedDict[int, None] = field(default_factory=OrderedDict)


class PrefixTrees:
    """The approximate prefix trees of one role's workers.

    A page hash names its whole prefix, so a tree is a set of hashes. A prompt's pages are touched from the
    last to the first. So a page is never older than the pages after it, eviction takes leaves, and every set
    stays closed under prefixes. Therefore bisection finds the longest match, in one table for all workers.
    """

    def __init__(self) -> None:
        self._workers: dict[str, _Holder] = {}
        self._holders: dict[int, int] = {}  # page hash -> mask of the workers' bits

    def __len__(self) -> int:
        """The number of different pages."""
        return len(self._holders)

    def longest(self, hashes: list[int]) -> tuple[int, int]:
        """The number of leading pages that some worker holds, and a mask of the workers that hold all."""
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in self._holders:
                low = middle
            else:
                high = middle - 1
        return low, self._holders[hashes[low - 1]] if low else 0

    def held(self, worker: str, hashes: list[int]) -> int:
        """The number of leading pages that this worker holds."""
        holder = self._workers.get(worker)
        if holder is None:
            return 0
        return next((n for n, page in enumerate(hashes) if page not in holder.pages), len(hashes))

    def holds(self, worker: str, mask: int) -> bool:
        """Whether the mask has the worker's bit."""
        holder = self._workers.get(worker)
        return holder is not None and bool(mask & holder.bit)

    def add(self, worker: str, hashes: list[int], capacity: int) -> None:
        """The worker holds these pages now. Beyond `capacity` pages its oldest are dropped."""
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
        """The worker holds nothing any more."""
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
    """Follows prefixes by its own earlier choices."""

    def __init__(
        self,
        weights: PolicyWeights,
        alone_tokens: int,
        chance: random.Random,
        peers: PeerFetch | None = None,
    ) -> None:
        super().__init__(weights, alone_tokens, chance, peers)
        self.prefill_trees = PrefixTrees()
        self.decode_trees = PrefixTrees()

    def choose(self, request: PlacementRequest, prefill: RoleCandidates, decode: RoleCandidates) -> Choice:
        prompt: list[int] = request.hashes.tolist()
        tokens, weights = request.prompt_tokens, self.weights
        d = self._follow(
            self.decode_trees, prompt, tokens, decode, decode.workers.requests, weights.requests_objective
        )
        held = self.decode_trees.held(decode.workers.names[d], prompt) * decode.page_tokens
        if len(prefill.workers) == 0 or max(1, tokens - held) <= self.alone_tokens:
            return Choice(request, prefill, decode, None, d)
        p = self._follow(
            self.prefill_trees, prompt, tokens, prefill, prefill.workers.queued, weights.queue_objective
        )
        return Choice(request, prefill, decode, p, d)

    def costs(self, choice: Choice) -> dict[str, Floats]:
        return {"decode": choice.decode.workers.requests, "prefill": choice.prefill.workers.queued}

    def placed(self, choice: Choice) -> None:
        prompt: list[int] = choice.request.hashes.tolist()
        self._add(self.decode_trees, choice.decode, choice.decode_row, prompt)
        if choice.prefill_row is not None:
            self._add(self.prefill_trees, choice.prefill, choice.prefill_row, prompt)

    def forget(self, worker: str) -> None:
        self.prefill_trees.forget(worker)
        self.decode_trees.forget(worker)

    def _add(self, trees: PrefixTrees, candidates: RoleCandidates, row: int, prompt: list[int]) -> None:
        record = candidates.workers.estimates[row].record
        tokens = max(record.total_tokens, record.host_tokens)  # host memory is written through
        trees.add(record.id, prompt, tokens // max(1, candidates.page_tokens))

    def _follow(
        self,
        trees: PrefixTrees,
        prompt: list[int],
        prompt_tokens: int,
        candidates: RoleCandidates,
        load: Floats,
        objective: float,
    ) -> int:
        """The row to choose among one role's workers, for a prompt given as page hashes."""
        pages, mask = trees.longest(prompt)
        if pages * candidates.page_tokens <= _FOLLOWED * prompt_tokens:
            return self.cheapest(load)
        rows = [row for row, name in enumerate(candidates.workers.names) if trees.holds(name, mask)]
        if not rows:  # the holders are draining, or to be avoided
            return self.cheapest(load)
        row = rows[self.cheapest(load[np.array(rows)])]
        return row if load[row] - load.min() <= objective else self.cheapest(load)
