"""bench.radix, with tenants: what sharing pages between tenants costs the tree.

Two trees hold the same conversations of 32 turns: one knows no tenants, and in the other each conversation is
a tenant's, whose first turns are public. Sixteen conversations have the same public beginning. Every
conversation is looked up in both trees, one after the other, in random order.
"""

from __future__ import annotations

import gc
import tracemalloc
from functools import partial
from typing import NamedTuple

import numpy as np

from bench.common import seconds
from bench.radix_tree import BatonTree, Tokens

TURN, TURNS = 128, 32  # tokens of a node, nodes of a conversation
PUBLIC = {"mixed": 4, "own": 0, "public": TURNS}  # of the turns of a conversation
_GROUP = 16  # conversations with the same public beginning
_CONVERSATIONS = 320
_MEASURED = 64  # conversations in the trees whose memory is counted
_ROUNDS = 9
_VOCAB = 128_000


class Costs(NamedTuple):
    """Of one page size."""

    ratios: dict[str, float]
    values: dict[str, float]


class _Conversation(NamedTuple):
    """The tokens, and whose its private turns are."""

    tokens: Tokens
    tenant: str


class _Talk:
    """Conversations of which the first turns are public."""

    def __init__(self, public: int, count: int) -> None:
        self.public_tokens = public * TURN
        self.all = [self._conversation(i) for i in range(count)]

    def _conversation(self, i: int) -> _Conversation:
        length = TURN * TURNS
        tokens = np.random.default_rng((1, i)).integers(0, _VOCAB, length, dtype=np.int32)
        common = np.random.default_rng((2, i // _GROUP)).integers(0, _VOCAB, length, dtype=np.int32)
        tokens[: self.public_tokens] = common[: self.public_tokens]
        return _Conversation(tokens, f"tenant-{i}")


def _filled(talk: _Talk, page_size: int, has_tenants: bool) -> BatonTree:
    """A tree into which all conversations were inserted, turn by turn."""
    tree = BatonTree(page_size, len(talk.all) * TURN * TURNS, has_tenants)
    for tokens, tenant in talk.all:
        for end in range(TURN, TURN * TURNS + 1, TURN):
            is_own = has_tenants and end > talk.public_tokens
            tree.insert(tokens[:end], tenant if is_own else "")
    return tree


def tenant_costs(page_size: int) -> Costs:
    """`ratios`: KIND_lookup is a look-up where tenants share against one without tenants, of conversations
    with some public turns, none, or nothing else; tenant_node_bytes is how much larger a node is."""
    ratios: dict[str, float] = {}
    values: dict[str, float] = {}
    for kind, public in PUBLIC.items():
        plain, shared = _lookups(_Talk(public, _CONVERSATIONS), page_size)
        ratios[f"{kind}_lookup"] = round(shared / plain, 3)
        values |= {f"{kind}_lookup_us": round(shared, 2), f"{kind}_lookup_us_plain": round(plain, 2)}
    talk = _Talk(PUBLIC["mixed"], _MEASURED)
    plain, shared = (_bytes_node(talk, page_size, has_tenants) for has_tenants in (False, True))
    ratios["tenant_node_bytes"] = round(shared - plain, 1)
    return Costs(ratios, values)


def _lookups(talk: _Talk, page_size: int) -> tuple[float, float]:
    """Median microseconds of a hit on a whole conversation, without tenants and with them."""
    trees = {has_tenants: _filled(talk, page_size, has_tenants) for has_tenants in (False, True)}
    gc.collect()
    chance = np.random.default_rng(3)
    spent: dict[bool, list[float]] = {False: [], True: []}
    for i in chance.permutation(np.repeat(np.arange(_CONVERSATIONS), _ROUNDS)):
        tokens, tenant = talk.all[i]
        keys = {False: trees[False].key(tokens), True: trees[True].key(tokens, tenant)}
        for has_tenants in (False, True) if chance.random() < 0.5 else (True, False):
            spent[has_tenants].append(seconds(partial(trees[has_tenants].hit, keys[has_tenants])))
    return float(np.median(spent[False])) * 1e6, float(np.median(spent[True])) * 1e6


def _bytes_node(talk: _Talk, page_size: int, has_tenants: bool) -> float:
    """Memory of a tree and of what is counted on it, per node."""
    _filled(_Talk(talk.public_tokens // TURN, 1), page_size, has_tenants)  # what is made once, at first use
    gc.collect()
    tracemalloc.start()
    tree = _filled(talk, page_size, has_tenants)
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / sum(1 for _ in tree.cache.tree.nodes())
