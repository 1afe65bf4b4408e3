"""The cost of the radix tree on the scheduler's path: `python -m bench.radix --json`.

A tree of N NODES (10k, 100k, 1m) holds conversations of 32 turns of 128 tokens: a node is one turn. Every
conversation has 4,096 tokens, so the tree has 128 N. `values` are microseconds, medians:

    key_4096_us              the key of a request's 4,096 tokens, once per request, from an int32 array
    match_4096_us_SIZE       a hit on all 4,096 tokens, through 32 nodes: the walk, access times, indices, and
                             one lock and unlock of the last node. Each time another conversation, in random
                             order, so that its nodes are not in the processor's caches
    match_4096_us_SIZE_warm  the same conversation each time
    match_4096_us_SIZE_miss  a match that finds nothing
    insert_4096_us_SIZE      the last turn of a conversation of which the tree has 31: hit counts, a new node
    evict_node_us_SIZE       eviction in lru order, per node freed
    build_us_SIZE            building the tree, per node
    bytes_node_SIZE          resident memory of the tree, per node (page size 16 only)

Page size 16; `_p1` is page size 1; `sglang_` is SGLang's own Python RadixCache, if it can be imported.
`ratios`: match_1m_vs_10k and evict_1m_vs_10k, 1.0 when size does not matter. With tenants who share pages
(bench/radix_tenants.py), at page size 16:

    mixed_lookup        match and lock of a conversation with four public turns and then a tenant's own,
                        against the same in a tree without tenants; own_lookup, public_lookup: without public
                        turns, with public turns alone
    tenant_node_bytes   how many bytes more a node takes
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.common import argument_parser, medians, print_result
from bench.radix_sglang import open_sglang
from bench.radix_tenants import tenant_costs
from bench.radix_tree import BatonTree, Tree

TURN = 128  # tokens, one node
TURNS = 32
CONTEXT = TURN * TURNS
SIZES = {"10k": 10_000, "100k": 100_000, "1m": 1_000_000}
VOCAB = 128_000
CALLS = 300  # timed one by one in each round
EVICTED = 40  # nodes in each round
ROUNDS = 5
Tokens = npt.NDArray[np.int32]


class Forest:
    """A tree full of conversations."""

    def __init__(self, tree: Tree, nodes: int, seed: int) -> None:
        self.tree = tree
        self._seed = seed
        self._rng = np.random.default_rng(seed)
        self._count = nodes // TURNS
        before, started = resident_bytes(), time.perf_counter()
        for i in range(self._count):
            tokens = self.conversation(i)
            for end in range(TURN, CONTEXT + 1, TURN):
                tree.insert(tokens[:end])
        self.build_us = (time.perf_counter() - started) / (self._count * TURNS) * 1e6
        self.bytes_node = (resident_bytes() - before) / (self._count * TURNS)

    def conversation(self, i: int) -> Tokens:
        """The tokens of conversation `i`; those from `count` on are not in the tree."""
        return np.random.default_rng((self._seed, i)).integers(0, VOCAB, CONTEXT, dtype=np.int32)

    def match(self) -> float:
        """Microseconds of a hit, each in another conversation."""
        return self._timed(map(self.conversation, self._some(CALLS)), self.tree.hit)

    def match_warm(self) -> float:
        """Microseconds of a hit in the same conversation as before."""
        return self._timed([self.conversation(self._some(1)[0])] * CALLS, self.tree.hit)

    def miss(self) -> float:
        """Microseconds of a match that finds nothing."""
        return self._timed((self.conversation(self._count + i) for i in range(CALLS)), self.tree.hit)

    def insert(self) -> float:
        """Microseconds of inserting the last of 32 turns."""

        def grown() -> Iterator[Tokens]:
            for i in self._some(CALLS // 5):
                tokens = self.conversation(i)
                tokens[-TURN:] = self._rng.integers(0, VOCAB, TURN)
                yield tokens

        return self._timed(grown(), self.tree.insert_key, self.tree.reserve)

    def evict(self) -> float:
        """Microseconds per node of evicting some."""
        started = time.perf_counter()
        freed = self.tree.evict(EVICTED * TURN)
        return (time.perf_counter() - started) / (freed // TURN) * 1e6

    def _some(self, n: int) -> list[int]:
        return [int(i) for i in self._rng.integers(0, self._count, n)]

    def _timed(
        self,
        conversations: Iterable[Tokens],
        work: Callable[[Any], object],
        prepare: Callable[[Any], object] | None = None,
    ) -> float:
        spent = []
        for tokens in conversations:
            key = self.tree.key(tokens)
            if prepare is not None:
                prepare(key)
            started = time.perf_counter()
            work(key)
            spent.append(time.perf_counter() - started)
        return float(np.median(spent)) * 1e6


def key_us(tree: Tree, tokens: Tokens) -> float:
    """Microseconds of making a key; never the same array twice in a row."""
    copies = [tokens.copy() for _ in range(CALLS)]
    spent = []
    for copy in copies:
        started = time.perf_counter()
        tree.key(copy)
        spent.append(time.perf_counter() - started)
    return float(np.median(spent)) * 1e6


def resident_bytes() -> int:
    """The resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def measure(make: Callable[[int], Tree], sizes: dict[str, int], suffix: str) -> dict[str, float]:
    """All values of one kind of tree, the sizes measured alternately."""
    forests = {name: Forest(make(nodes * TURN), nodes, seed=1) for name, nodes in sizes.items()}
    gc.collect()
    measured: dict[str, list[float]] = {}
    values = {}
    for name, forest in forests.items():
        values[f"build_us_{name}{suffix}"] = forest.build_us
        if not suffix:  # later trees reuse memory that the first ones freed
            values[f"bytes_node_{name}"] = forest.bytes_node
    for _ in range(ROUNDS):
        for name, forest in forests.items():
            for key, work in {
                f"match_4096_us_{name}{suffix}": forest.match,
                f"match_4096_us_{name}{suffix}_warm": forest.match_warm,
                f"match_4096_us_{name}{suffix}_miss": forest.miss,
                f"insert_4096_us_{name}{suffix}": forest.insert,
                f"evict_node_us_{name}{suffix}": forest.evict,
            }.items():
                measured.setdefault(key, []).append(work())
    forest = next(iter(forests.values()))
    values[f"key_4096_us{suffix}"] = key_us(forest.tree, forest.conversation(0))
    return values | medians(measured)


def main() -> None:
    """Command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="nodes of the trees")
    parser.add_argument("--pages", nargs="+", type=int, default=[16, 1], help="page sizes")
    options = parser.parse_args()
    sizes = {name: SIZES[name] for name in options.sizes}
    sglang = open_sglang()
    values: dict[str, float] = {}
    for page_size in options.pages:
        suffix = "" if page_size == 16 else f"_p{page_size}"
        makers: dict[str, Callable[[int], Tree]] = {"": lambda tokens: BatonTree(page_size, tokens)}  # noqa: B023
        if sglang is not None:
            makers["sglang_"] = lambda tokens: sglang(page_size, tokens)  # noqa: B023
        for prefix, make in makers.items():
            found = measure(make, sizes, suffix)
            values |= {prefix + name: round(value, 2) for name, value in found.items()}
            gc.collect()
    ratios = {
        f"{what}_1m_vs_10k": round(values[f"{key}_1m"] / values[f"{key}_10k"], 2)
        for what, key in (("match", "match_4096_us"), ("evict", "evict_node_us"))
        if {f"{key}_1m", f"{key}_10k"} <= values.keys()
    }
    tenants = tenant_costs(16)
    print_result("radix", ratios | tenants.ratios, values | tenants.values, options.json)


if __name__ == "__main__":
    main()
