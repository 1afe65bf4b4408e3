"""Another engine's blocks as our pages: the pages the index ends with are those of the engine's tree."""

from __future__ import annotations

from array import array
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.events.external_engine import ExternalHashes, ExternalReader, Unusable
from router.index.global_index import GlobalIndex
from wire.events import BlockRemoved, BlockStored, Unread
from wire.page_hash import event_hash, namespace_seed, page_digests

MODEL = "m"
PAGE = 4


def pages_of(tokens: list[int], extra_key: str = "", cache_salt: str = "", page: int = PAGE) -> list[int]:
    """Event hashes of the whole pages of a prompt: what a router looks up."""
    seed = namespace_seed(MODEL, extra_key, cache_salt)
    return [event_hash(digest) for digest in page_digests(seed, array("i", tokens).tobytes(), page)]


class ExternalEngine:
    """An engine, and the reader of its events."""

    def __init__(self, page: int = PAGE) -> None:
        self.index = GlobalIndex()
        self.index.join("w")
        self.hashes = ExternalHashes(MODEL, page)
        self._reader = ExternalReader(self.index, "w", self.hashes)

    def read(self, *events: Any) -> list[Unread]:
        return list(self._reader.apply(msgpack.packb([0.0, list(events), 0])))

    @property
    def held(self) -> set[int]:
        return self.index.held("w")


def stored(names: list[Any], tokens: list[int], parent: Any = None, **fields: Any) -> dict[str, Any]:
    """As vLLM says it."""
    base = {
        "type": "BlockStored", "block_hashes": names, "parent_block_hash": parent, "token_ids": tokens,
        "block_size": len(tokens) // len(names), "lora_id": None, "medium": "GPU", "lora_name": None,
    }  # fmt: skip
    return {**base, **fields}


def removed(names: list[Any], **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": names, "medium": "GPU", **fields}


TOKENS = list(range(100, 124))


@pytest.mark.parametrize("names", [[2**64 - 1, 5], [-1, 5], [b"\xff" * 32, b"\0" * 7 + b"\5"]])
def test_blocks_are_hashed_anew_and_removed_by_their_own_names(names: list[Any]) -> None:
    engine = ExternalEngine()
    assert engine.read(stored(names, TOKENS[:8])) == []
    assert engine.held == set(pages_of(TOKENS[:8]))
    child = stored([9], TOKENS[8:12], parent=names[-1])
    assert engine.read(child) == []
    assert engine.held == set(pages_of(TOKENS[:12]))
    assert engine.read(removed([9]), removed([names[1]])) == []
    assert engine.held == set(pages_of(TOKENS[:4]))
    assert engine.read({"type": "AllBlocksCleared"}) == []
    assert engine.held == set()
    assert len(engine.hashes) == 0


def test_signed_and_unsigned_names_are_the_same_block() -> None:
    engine = ExternalEngine()
    engine.read(stored([2**64 - 7], TOKENS[:4]), stored([3], TOKENS[4:8], parent=-7))
    assert engine.held == set(pages_of(TOKENS[:8]))
    engine.read(["BlockRemoved", [-7], "GPU"])
    assert engine.held == set(pages_of(TOKENS[:8])[1:])


@pytest.mark.parametrize("page", [1, 2, 4, 8, 16])
@given(data=st.data())
def test_a_tree_of_blocks_larger_smaller_and_as_large_as_pages(page: int, data: st.DataObject) -> None:
    """Blocks of 4 tokens; an engine that evicts the tails first, as all do."""
    engine = ExternalEngine(page)
    blocks: dict[int, tuple[int | None, list[int]]] = {}  # name -> parent, tokens from the beginning
    for name in range(1, data.draw(st.integers(1, 12))):
        leaves = [one for one in blocks if all(parent != one for parent, _ in blocks.values())]
        if leaves and data.draw(st.integers(0, 2)) == 0:
            victim = data.draw(st.sampled_from(leaves))
            del blocks[victim]
            assert engine.read(removed([victim])) == []
        else:
            parent = data.draw(st.sampled_from([None, *blocks]))
            before = blocks[parent][1] if parent is not None else []
            count = data.draw(st.integers(1, 3))
            names = [1000 * name + i for i in range(count)]
            tokens = [7 * name + i for i in range(4 * count)]  # nothing is stored twice
            assert engine.read(stored(names, tokens, parent)) == []
            for i, one in enumerate(names):
                blocks[one] = (parent if i == 0 else names[i - 1], before + tokens[: 4 * i + 4])
        assert engine.held == {name for _, tokens in blocks.values() for name in pages_of(tokens, page=page)}
        assert len(engine.hashes) == len(blocks)


@pytest.mark.parametrize(("fields", "extra_key", "salt"), [
    ({"lora_name": "french"}, "french", ""),
    ({"lora_name": "french", "lora_id": 3, "extra_keys": [["french"], ["french"]]}, "french", ""),
    ({"extra_keys": [["pepper"], None]}, "", "pepper"),
    ({"lora_name": "french", "extra_keys": [["french", "pepper"], ["french"]]}, "french", "pepper"),
    ({"cache_salt": "pepper"}, "", "pepper"),
    ({"cache_salt": "pepper", "lora_name": "french"}, "french", "pepper"),
    ({"extra_keys": [None, []]}, "", ""),
])  # fmt: skip
def test_namespaces_of_the_field_are_ours(fields: dict[str, Any], extra_key: str, salt: str) -> None:
    engine = ExternalEngine()
    engine.read(stored([1, 2], TOKENS[:8], **fields))
    later = {key: value for key, value in fields.items() if key == "lora_name"}
    engine.read(stored([3], TOKENS[8:12], parent=2, **later))
    assert engine.held == set(pages_of(TOKENS[:12], extra_key, salt))


def test_what_is_not_a_namespace_of_ours_is_never_found_nor_mixed_up() -> None:
    """The tokens of two images are the same placeholders; a LoRA that is only numbered is nobody's name."""
    engine = ExternalEngine()
    for name, image in ((10, "cat"), (20, "dog")):
        keys = [None, [[image, 0]], [[image, 4]]]
        assert engine.read(stored([name, name + 1, name + 2], TOKENS[:12], extra_keys=keys)) == []
    engine.read(stored([30], TOKENS[:4], lora_id=4))
    assert len(engine.held) == 1 + 2 + 2 + 1, "only the block before the images is shared"
    assert engine.held & set(pages_of(TOKENS[:12])) == set(pages_of(TOKENS[:4]))
    again = ExternalEngine()
    again.read(stored([1], TOKENS[:4]))
    again.read(stored([2], TOKENS[4:8], parent=1, extra_keys=[[["cat", 0]]]))
    assert again.held < engine.held, "however it is cut into events"


def test_groups_that_do_not_decide_reuse_are_left_out_and_counted() -> None:
    engine = ExternalEngine()
    full = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    window = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 8}
    unread = engine.read(
        stored([1, 2], TOKENS[:8], **full), stored([1, 2], TOKENS[:8], **window), removed([1], group_idx=0)
    )
    assert [event.kind for event in unread] == ["other_group", "other_group"]
    assert engine.held == set(pages_of(TOKENS[:8]))
    assert engine.read(removed([2], group_idx=1)) == []
    assert engine.held == set(pages_of(TOKENS[:4]))
    older = ExternalEngine()
    unread = older.read(*(stored([i], TOKENS[:4], group_idx=i) for i in (0, 1)), removed([0], group_idx=1))
    assert [event.kind for event in unread] == ["other_group"] * 2
    assert older.held == set(pages_of(TOKENS[:4]))
    for kind in ("mla_attention", "sink_full_attention"):
        assert ExternalEngine().read(stored([1], TOKENS[:4], group_idx=2, kv_cache_spec_kind=kind)) == []
    assert ExternalEngine().read(stored([1], TOKENS[:4], kv_cache_spec_kind="mamba"))[0].kind == "other_group"


def test_a_block_may_be_in_several_tiers_and_is_forgotten_with_the_last() -> None:
    engine = ExternalEngine()
    engine.read(stored([1, 2], TOKENS[:8]))
    assert engine.read(stored([1, 2], [], medium="CPU", block_size=0)) == [], "offloaded: no tokens are told"
    engine.read(removed([1, 2]))
    assert engine.held == set(pages_of(TOKENS[:8]))
    engine.read(stored([3], TOKENS[8:12], parent=2, medium="DISK"))
    assert engine.held == set(pages_of(TOKENS[:12]))
    engine.read(removed([1, 2], medium="CPU_PINNED"), removed([3], medium="EXTERNAL"))
    assert (engine.held, len(engine.hashes)) == (set(), 0)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an orphan": (stored([8], TOKENS[:4], parent=77), "orphan"),
    "an unknown block without tokens": (stored([8], TOKENS[:1], token_ids=[]), "orphan"),
    "block size 0": (stored([8], TOKENS[:4], block_size=0), "block_size"),
    "block size 3": (stored([8], TOKENS[:3]), "block_size"),
    "another block size": (stored([8], TOKENS[:8]), "block_size"),
    "too few tokens": (stored([8], TOKENS[:3], block_size=4), "malformed"),
    "pairs of tokens": (stored([8], TOKENS[:4], token_ids=[[1, 2]] * 4), "malformed"),
    "tokens beyond 32 bits": (stored([8], TOKENS[:4], token_ids=[2**40] * 4), "malformed"),
    "an unknown tier": (stored([8], TOKENS[:4], medium="TAPE"), "medium"),
    "keys of no block": (stored([8], TOKENS[:4], extra_keys=[]), "malformed"),
    "keys that are none": (stored([8], TOKENS[:4], extra_keys=[7]), "malformed"),
    "removed from an unknown tier": (removed([1], medium="TAPE"), "medium"),
    "no event at all": ({"type": "BlockMigrated"}, "unknown_type"),
}


@pytest.mark.parametrize(("bad", "kind"), BAD.values(), ids=BAD.keys())
def test_what_cannot_be_used_is_named_and_harms_nothing(bad: dict[str, Any], kind: str) -> None:
    engine = ExternalEngine()
    unread = engine.read(stored([1], TOKENS[:4]), bad, stored([2], TOKENS[4:8], parent=1))
    assert [event.kind for event in unread] == [kind]
    assert unread[0].reason
    assert engine.held == set(pages_of(TOKENS[:8]))
    assert engine.read(removed([8])) == [], "of what was never usable nothing is removed"


def test_a_block_size_is_taken_up_again_when_nothing_is_left() -> None:
    hashes = ExternalHashes(MODEL, PAGE)
    small = BlockStored([1], None, [1, 2], 2, None, "GPU", None)
    large = BlockStored([2], None, [1, 2, 3, 4, 5, 6, 7, 8], 8, None, "GPU", None)
    assert hashes.stored(small) == []
    with pytest.raises(Unusable, match="blocks of 8 tokens after blocks of 2"):
        hashes.stored(large)
    assert hashes.removed(BlockRemoved([1], "GPU")) == []
    assert len(hashes.stored(large)) == 2
