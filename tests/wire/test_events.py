"""Event batches: ours read by plain msgpack, others' shapes read by us, and no bad event drops a batch."""

from __future__ import annotations

import msgpack
import pytest

from common.errors import WireError
from wire.events import (
    MEDIA,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    begins_with_clear,
    decode_batch,
    encode_batch,
)

STORED = BlockStored([-1, 5], None, [1, 2, 3, 4], 2, None, "GPU", None)


def test_our_batch_is_a_three_element_array_of_tagged_maps() -> None:
    ts, events, rank = msgpack.unpackb(
        encode_batch(1.5, [STORED, BlockRemoved([5], "GPU"), AllBlocksCleared()])
    )
    assert (ts, rank) == (1.5, 0)
    assert [event["type"] for event in events] == ["BlockStored", "BlockRemoved", "AllBlocksCleared"]
    assert events[0] == {
        "type": "BlockStored",
        "block_hashes": [-1, 5],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


def test_round_trip() -> None:
    batch = decode_batch(encode_batch(2.0, [STORED, AllBlocksCleared()]))
    assert (batch.ts, batch.events, batch.unread) == (2.0, [STORED, AllBlocksCleared()], [])


VLLM_NEW_FIELDS = {
    "extra_keys": [None, ["salt"]], "group_idx": 0, "kv_cache_spec_kind": "full_attention",
    "kv_cache_spec_sliding_window": None, "locality": "LOCAL", "ownership": None, "session_id": "s",
    "lookahead_token_ids": [9],
}  # fmt: skip
SGLANG = {
    "type": "BlockStored", "block_hashes": [-1, 5], "parent_block_hash": None, "token_ids": [1, 2, 3, 4],
    "block_size": 2, "lora_id": None,
}  # fmt: skip


@pytest.mark.parametrize("stored", [
    ["BlockStored", [2**64 - 1, 5], None, [1, 2, 3, 4], 2, None, "GPU", None],
    ["BlockStored", [2**64 - 1, 5], None, [1, 2, 3, 4], 2, None, "GPU"],
    {"type": "BlockStored", "block_hashes": [b"\xff" * 32, b"\0" * 7 + b"\5"], "parent_block_hash": None,
     "token_ids": [1, 2, 3, 4], "block_size": 2, "medium": "GPU", "some_new_field": {"x": [{7: 1}]}},
    {**SGLANG, "medium": "GPU"},
], ids=["vllm positional", "older positional", "bytes and unknown fields", "sglang"])  # fmt: skip
def test_other_engines_shapes(stored: object) -> None:
    batch = decode_batch(msgpack.packb([1.0, [stored]]))
    assert batch.events == [STORED]
    assert batch.unread == []


@pytest.mark.parametrize("rank", [[], [None], [3], [3, "more"]])
def test_an_envelope_may_be_shorter_or_longer(rank: list[object]) -> None:
    batch = decode_batch(msgpack.packb([7, [SGLANG, {"type": "AllBlocksCleared"}], *rank]))
    assert [type(event).__name__ for event in batch.events] == ["BlockStored", "AllBlocksCleared"]
    assert batch.ts == 7.0


def test_groups_and_parents_are_read_in_both_forms() -> None:
    as_map = {
        **SGLANG,
        **VLLM_NEW_FIELDS,
        "parent_block_hash": -2,
        "medium": "CPU",
        "lora_name": "l",
    }
    positional = ["BlockStored", [-1, 5], b"\xff" * 7 + b"\xfe", [1, 2, 3, 4], 2, None, "CPU", "l",
                  [None, ["salt"]], 0, "full_attention", None]  # fmt: skip
    removed = [{"type": "BlockRemoved", "block_hashes": [-(2**63)], "medium": "CPU", "group_idx": 1},
               ["BlockRemoved", [2**63], "CPU", 1]]  # fmt: skip
    first, second, *rest = decode_batch(msgpack.packb([1.0, [as_map, positional, *removed], 0])).events
    assert first == second
    assert isinstance(first, BlockStored)
    assert (first.parent_block_hash, first.group_idx, first.kv_cache_spec_kind) == (-2, 0, "full_attention")
    assert rest == [BlockRemoved([-(2**63)], "CPU", 1)] * 2


def test_every_medium_of_the_field_is_one_of_three_tiers() -> None:
    names = ["GPU", "CPU", "CPU_PINNED", "DISK", "STORAGE", "EXTERNAL"]
    assert [MEDIA[name] for name in names] == ["GPU", "CPU", "CPU", "STORAGE", "STORAGE", "STORAGE"]


BAD = {
    "unknown type": ({"type": "Mystery"}, "unknown_type"),
    "unknown positional": (["BlockMigrated", [1]], "unknown_type"),
    "no event": (7, "malformed"),
    "nothing": ([], "malformed"),
    "a field is missing": (["BlockRemoved"], "malformed"),
    "no tag": ({"block_hashes": [1]}, "malformed"),
    "a hash of text": ({"type": "BlockRemoved", "block_hashes": ["x"]}, "malformed"),
    "an empty hash": ({"type": "BlockRemoved", "block_hashes": [b""]}, "malformed"),
    "a medium that is a number": ({"type": "BlockRemoved", "block_hashes": [1], "medium": 7}, "malformed"),
    "tokens that are none": ({**SGLANG, "token_ids": None}, "malformed"),
    "not UTF-8": ({"type": "BlockRemoved", "block_hashes": [1], "medium": b"\xff"}, "malformed"),
}


@pytest.mark.parametrize(("bad", "kind"), BAD.values(), ids=BAD.keys())
def test_a_bad_event_is_named_and_the_rest_is_read(bad: object, kind: str) -> None:
    good = {"type": "BlockRemoved", "block_hashes": [1], "medium": "DISK"}
    batch = decode_batch(msgpack.packb([1.0, [good, bad, good], 0]))
    assert batch.events == [BlockRemoved([1], "DISK")] * 2
    (unread,) = batch.unread
    assert unread.kind == kind
    assert msgpack.unpackb(unread.raw) == bad
    assert unread.reason


def test_text_that_is_no_text_costs_its_event_only() -> None:
    good = msgpack.packb({"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"})
    bad = msgpack.packb({"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}).replace(
        b"GPU", b"\xffPU"
    )
    batch = decode_batch(b"\x93\x01\x92" + bad + good + b"\x00")
    assert batch.events == [BlockRemoved([1], "GPU")]
    assert [unread.kind for unread in batch.unread] == ["malformed"]


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", msgpack.packb({"a": 1}), msgpack.packb([1]), msgpack.packb(["x", []])]
)
def test_a_broken_envelope_is_a_wire_error(payload: bytes) -> None:
    with pytest.raises(WireError):
        decode_batch(payload)


def test_a_batch_that_begins_with_a_clear_is_told_by_its_first_event() -> None:
    removed = BlockRemoved([1], "GPU")
    assert begins_with_clear(encode_batch(0.0, [AllBlocksCleared(), removed]))
    assert begins_with_clear(msgpack.packb([0.0, [["AllBlocksCleared"], {"type": "later"}]])), (
        "the older form"
    )
    assert not begins_with_clear(encode_batch(0.0, [removed, AllBlocksCleared()]))
    named = BlockStored([1], None, [0] * 4, 4, None, None, "AllBlocksCleared")
    assert not begins_with_clear(encode_batch(0.0, [named])), "its name is not its type"
    for payload in (b"", b"AllBlocksCleared", msgpack.packb([0.0, []]), msgpack.packb([0.0, [{}]])):
        assert not begins_with_clear(payload)
