"""Event batches read in C++ against the same read in Python, and bytes that are no batches at all."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.errors import WireError
from router.index.global_index import GlobalIndex, as_hashes
from router.index.page_table import HELD, PageTable, PythonPageTable, Tier, make_page_table
from wire.events import MEDIA, AllBlocksCleared, AnyEvent, BlockRemoved, BlockStored, encode_batch

PAGES = [0, 1, -1, 127, 128, -32, -33, 2**31, -(2**31), 2**63 - 1, -(2**63), 12345678901234567]
MEDIA_SEEN = [None, *MEDIA, "gpu", "Cpu_Pinned", "disk"]

pages = st.lists(st.sampled_from(PAGES), max_size=6)
media = st.sampled_from(MEDIA_SEEN)
text = st.text("aß", max_size=40)
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | text
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)


@st.composite
def ours(draw: st.DrawFn) -> AnyEvent:
    hashes = draw(pages)
    kind = draw(st.sampled_from(["store", "bigram", "private", "remove", "clear"]))
    if kind == "clear":
        return AllBlocksCleared()
    if kind == "remove":
        return BlockRemoved(hashes, draw(media))
    size = draw(st.integers(1, 3))
    numbers = range(200, 200 + size * len(hashes)) if kind != "private" else range(0)
    return BlockStored(
        hashes, draw(st.none() | st.sampled_from(PAGES)),
        [[token, token + 1] for token in numbers] if kind == "bigram" else list(numbers),
        size, draw(st.none() | st.integers(0, 9)), draw(media), draw(st.none() | text),
        extra_keys=draw(st.none() | st.lists(anything, max_size=2)),
        cache_salt=draw(st.none() | st.just("s")),
    )  # fmt: skip


@st.composite
def other_events(draw: st.DrawFn) -> dict[str, Any]:
    """The map in another engine's style: unsigned hashes, fields in any order, unknown or left out."""
    event = msgpack.unpackb(encode_batch(0.0, [draw(ours())]), strict_map_key=False)[1][0]
    if "block_hashes" in event and draw(st.booleans()):
        event["block_hashes"] = [page % 2**64 for page in event["block_hashes"]]
    for optional in ("medium", "lora_name", "parent_block_hash"):
        if draw(st.booleans()):
            event.pop(optional, None)
    event.update(draw(st.dictionaries(st.sampled_from(["locality", "session_id", "ß"]), anything)))
    return dict(draw(st.permutations(list(event.items()))))


def state(table: PageTable) -> list[Any]:
    """All there is to see of two slots."""
    seen: list[Any] = [len(table), *(sorted(table.held(slot, 1 << tier)) for slot in (0, 1) for tier in Tier)]
    for page in PAGES:
        found = np.empty((4, 2), np.int32)
        table.find(as_hashes([page]), found)
        seen.append(found.tolist())
    return seen


def both(payloads: list[bytes]) -> tuple[PageTable, list[int]]:
    """Apply to both; assert that they are equal after each. The table in C++, and what it said."""
    table, reference = make_page_table(), PythonPageTable()
    index = GlobalIndex(reference)
    index.join("w")
    said = []
    for payload in payloads:
        before = state(table)
        said.append(table.apply(0, payload))
        if said[-1] < 0:
            assert state(table) == before
            break  # from here the Python path would go on alone
        try:
            unread = index.apply("w", payload)
        except WireError:
            break
        if any("UnicodeDecodeError" in event.reason for event in unread):
            break  # it is stricter about text
        assert unread == []
        assert state(table) == state(reference)
    return table, said


@given(st.lists(st.lists(ours(), max_size=5), max_size=4))
def test_our_own_batches_are_all_understood(batches: list[list[AnyEvent]]) -> None:
    _, said = both([encode_batch(1.5, events) for events in batches])
    assert said == [len(events) for events in batches]


def test_what_a_stream_clears_are_its_own_pages() -> None:
    """Of each table, applied natively and event by event."""
    index = GlobalIndex(PythonPageTable())
    index.join("w")
    table = make_page_table()

    def stored(*pages: int) -> BlockStored:
        return BlockStored(list(pages), None, [], 1, None, "CPU", None)

    public, private = encode_batch(1.0, [stored(1, 2)]), encode_batch(1.0, [stored(-1, -2)])
    clear = encode_batch(1.0, [AllBlocksCleared(), stored(7)])
    left = {False: [-2, -1, 7], True: [1, 2, 7]}
    for is_private in (False, True):
        for payload, which in ((public, False), (private, True), (clear, is_private)):
            assert table.apply(0, payload, which) > 0
            index.apply("w", payload, which)
        assert sorted(table.held(0, HELD)) == sorted(index.held("w")) == left[is_private]
        table.clear(0, HELD)
        index.reset("w")


@given(st.lists(other_events(), max_size=5), st.none() | st.integers(0, 300))
def test_maps_of_other_engines_are_understood(events: list[dict[str, Any]], rank: int | None) -> None:
    _, said = both([msgpack.packb([1.5, events, rank])])
    assert said == [len(events)]


@settings(max_examples=300)
@given(st.lists(ours(), min_size=1, max_size=3), st.data())
def test_bytes_that_were_a_batch(events: list[AnyEvent], data: st.DataObject) -> None:
    payload = bytearray(encode_batch(1.5, events))
    for _ in range(data.draw(st.integers(1, 3), "changes")):
        at = data.draw(st.integers(0, len(payload) - 1), "at")
        payload[at] = data.draw(st.integers(0, 255), "byte")
    both([encode_batch(1.0, [BlockStored([1, -1], None, [1, 2], 1, None, "GPU", None)]), bytes(payload)])


@given(st.lists(ours(), min_size=1, max_size=3), st.data())
def test_a_truncated_batch_is_no_batch(events: list[AnyEvent], data: st.DataObject) -> None:
    payload = encode_batch(1.5, events)
    table, said = both([payload[: data.draw(st.integers(0, len(payload) - 1))]])
    assert said == [-1]
    assert both([payload + b"\0"])[1] == [-1]
    assert len(table) == 0


HEAD = b"\x93\xcb" + struct.pack(">d", 1.0)


@example(HEAD + b"\xdd\xff\xff\xff\xff")  # four billion events
@example(HEAD + b"\x91\x81\xacblock_hashes\xdd\xff\xff\xff\xff")
@example(HEAD + b"\x91\x81\xa9token_ids\xdd\xff\xff\xff\xff\x92")
@example(HEAD + b"\x91\x82\xa4type\xb0AllBlocksCleared\xa1x" + b"\x91" * 200_000 + b"\xc0\x00")
@example(HEAD + b"\x91\x82\xa4type\xb0AllBlocksCleared\xa1x" + b"\xdf\xff\xff\xff\xff" * 1000 + b"\x00")
@example(HEAD + b"\x91\x82\xa4type\xdb\xff\xff\xff\xff")
@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda tail: HEAD + b"\x91" + tail))
def test_any_bytes(payload: bytes) -> None:
    make_page_table().apply(0, payload)


@pytest.mark.parametrize(
    "fields",
    [
        {"block_hashes": [1, 2], "token_ids": [1, 2, 3], "block_size": 2},  # not twice two tokens
        {"block_hashes": [1], "token_ids": [1], "block_size": 0},
        {"block_hashes": [1], "token_ids": [1], "block_size": -1},
        {"block_hashes": [1], "token_ids": [1], "block_size": 1, "medium": "TAPE"},
        {"block_hashes": [1], "token_ids": [[1, 2, 3.0]], "block_size": 1},
        {"block_hashes": [1], "token_ids": ["a"], "block_size": 1},
        {"block_hashes": [1, 2], "token_ids": [1, [1, 2]], "block_size": 1},
        {"block_hashes": [1, 2], "token_ids": [[1, 2], 1], "block_size": 1},
        {"block_hashes": [1.0], "token_ids": [1], "block_size": 1},
        {"block_hashes": [b"12345678"], "token_ids": [1], "block_size": 1},
        {"block_hashes": 1, "token_ids": [1], "block_size": 1},
        {"block_hashes": [1], "token_ids": [1], "block_size": 1, "lora_name": 3},
        {"block_hashes": [1], "token_ids": [1], "block_size": 1, "group_idx": 1},
        {"block_hashes": [1], "token_ids": [1], "block_size": 1, "kv_cache_spec_kind": "sliding_window"},
        {"block_hashes": [1], "token_ids": [1]},
        {"block_hashes": [1, 2], "token_ids": [[1, 2]], "block_size": 1},
        {"token_ids": [], "block_size": 1},
        {"block_hashes": [1], "token_ids": [1], "block_size": 1, "type": "BlockMoved"},
    ],
)
def test_one_event_of_another_form_leaves_the_batch_to_python(fields: dict[str, Any]) -> None:
    good = {"type": "BlockStored", "block_hashes": [7], "token_ids": [1], "block_size": 1}
    table = make_page_table()
    assert table.apply(0, msgpack.packb([1.0, [good, {"type": "BlockStored", **fields}], 0])) == -1
    assert len(table) == 0
    assert table.apply(0, msgpack.packb([1.0, [good], 0])) == 1
    assert table.held(0, HELD) == [7]


def test_a_field_that_comes_twice_is_not_understood() -> None:
    once = msgpack.packb("block_hashes") + msgpack.packb([1])
    payload = HEAD + b"\x91\x83\xa4type\xacBlockRemoved" + once + once + b"\x00"
    assert make_page_table().apply(0, payload) == -1


def test_a_cache_that_was_reset_may_still_get_what_is_expected() -> None:
    table = make_page_table()
    pages = np.array([7], np.int64)
    table.store(0, Tier.GPU, pages)
    table.store(0, Tier.EXPECTED, pages)
    assert table.apply(0, encode_batch(0.0, [AllBlocksCleared()])) == 1
    found = np.empty((4, 1), np.int32)
    table.find(pages, found)
    assert found[:, 0].tolist() == [1, 0, 0, 1]
