"""Event batches: ours read by plain msgpack, others' shapes read by us, and no bad event drops a batch."""

from __future__ import annotations

import msgpack
import pytest

from wire.errors import WireError
from wire.events import AllBlocksCleared, BlockRemoved, BlockStored, decode_batch, encode_batch

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


@pytest.mark.parametrize("stored", [
    ["BlockStored", [2**64 - 1, 5], None, [1, 2, 3, 4], 2, None, "GPU", None],
    {"type": "BlockStored", "block_hashes": [b"\xff" * 32, b"\0" * 7 + b"\5"], "parent_block_hash": None,
     "token_ids": [1, 2, 3, 4], "block_size": 2, "medium": "GPU", "some_new_field": {"x": 1}},
])  # fmt: skip
def test_other_engines_shapes(stored: object) -> None:
    batch = decode_batch(msgpack.packb([1.0, [stored]]))
    assert batch.events == [STORED]


def test_a_bad_event_is_named_and_the_rest_is_read() -> None:
    events = [
        {"type": "Mystery"},
        7,
        ["BlockRemoved"],
        {"type": "BlockRemoved", "block_hashes": [1], "medium": "DISK"},
    ]
    batch = decode_batch(msgpack.packb([1.0, events, 0]))
    assert batch.events == [BlockRemoved([1], "DISK")]
    assert len(batch.unread) == 3
    assert "Mystery" in batch.unread[0].reason


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", msgpack.packb({"a": 1}), msgpack.packb([1]), msgpack.packb(["x", []])]
)
def test_a_broken_envelope_is_a_wire_error(payload: bytes) -> None:
    with pytest.raises(WireError):
        decode_batch(payload)
