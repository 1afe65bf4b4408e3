"""KV events: which pages a worker stores and removes, in the format of vLLM, SGLang and Dynamo.

A batch is the MessagePack array `[ts, events, dp_rank]`; an event is a map tagged by `type`. Frames on the
PUB socket: topic, 8-byte big-endian sequence number from 0, batch. Reading is lenient where engines differ:
older ones send positional arrays; hashes are signed, unsigned or bytes; fields and event types may be
unknown. A bad event does not drop its batch: it is returned as `Unread`, with the reason. Source: what vLLM
0.33 and SGLang 0.5.23 publish and Dynamo 1.6.1 reads (docs/decisions/0003-kv-events.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from common.errors import WireError

Medium = Literal["GPU", "CPU", "STORAGE"]
# Names of the three tiers, those of other engines included.
MEDIA: dict[str, Medium] = {
    "GPU": "GPU",
    "CPU": "CPU",
    "CPU_PINNED": "CPU",
    "DISK": "STORAGE",
    "EXTERNAL": "STORAGE",
    "STORAGE": "STORAGE",
}


class KVEvent(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type"):
    """Base of what travels in a batch."""


class BlockStored(KVEvent, frozen=True, tag="BlockStored", omit_defaults=True):
    """Pages became reusable: `block_hashes[i]` covers `token_ids[i * block_size : (i + 1) * block_size]`.

    Fields without a default are always on the wire. token_ids are always sent, because consumers hash
    them their own way; only on the socket of private pages they are empty. A hash is 64 bits, and engines
    write it signed or unsigned: compare modulo 2**64.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[Any]  # ints, or pairs of ints from a bigram cache
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    cache_salt: str | None = None
    group_idx: int | None = None  # vLLM: which KV group of a hybrid model; we publish the primary one only
    kv_cache_spec_kind: str | None = None  # vLLM: what that group is


class BlockRemoved(KVEvent, frozen=True, tag="BlockRemoved", omit_defaults=True):
    """Pages left a tier."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVEvent, frozen=True, tag="AllBlocksCleared"):
    """The worker's cache was reset."""


AnyEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """`ts` is seconds of the Unix clock; three elements are always sent."""

    ts: float
    events: Sequence[AnyEvent]
    dp_rank: int | None


UnreadKind = Literal[
    "batch", "malformed", "unknown_type", "medium", "other_group", "orphan", "block_size", "frames"
]
"""Why something was not used. Of a batch: it, or its frames, are broken. Of an event: a field is
missing or has the wrong type; the type or the tier is unknown; it is about a KV group other than the
primary one; its parent block is unknown; pages cannot be made of its block size."""


class _RawBatch(msgspec.Struct, frozen=True, array_like=True):
    """A batch of any engine. Events are decoded one by one, so that a bad one does not spoil the others."""

    ts: float
    events: list[msgspec.Raw]


class Unread(NamedTuple):
    """An event that could not be used, and why."""

    raw: Any  # the event, or its bytes
    reason: str
    kind: UnreadKind = "malformed"


class ReadBatch(NamedTuple):
    """A decoded batch: what was understood, in order, and what was not."""

    ts: float
    events: Sequence[AnyEvent]
    unread: list[Unread]


_encoder = msgspec.msgpack.Encoder()
_strict = msgspec.msgpack.Decoder(EventBatch)
_envelope = msgspec.msgpack.Decoder(_RawBatch)
_one: msgspec.msgpack.Decoder[AnyEvent] = msgspec.msgpack.Decoder(AnyEvent)
_loose = msgspec.msgpack.Decoder()
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def encode_batch(ts: float, events: Sequence[AnyEvent], dp_rank: int = 0) -> bytes:
    """One batch, ready for the wire."""
    return _encoder.encode(EventBatch(ts, events, dp_rank))


def decode_batch(payload: bytes | memoryview) -> ReadBatch:
    """A batch of ours, vLLM's or SGLang's. Raises WireError only when the envelope itself is broken."""
    try:
        batch = _strict.decode(payload)
        return ReadBatch(batch.ts, batch.events, [])
    except _UNREADABLE:
        pass  # not our own form: read event by event
    try:
        envelope = _envelope.decode(payload)
    except _UNREADABLE as error:
        raise WireError(f"not an event batch: {error}") from error
    events: list[AnyEvent] = []
    unread: list[Unread] = []
    for raw in envelope.events:
        try:
            events.append(_read_event(raw))
        except _UnknownType as error:
            unread.append(Unread(bytes(raw), str(error), "unknown_type"))
        except _MALFORMED as error:
            unread.append(Unread(bytes(raw), f"{type(error).__name__}: {error}"))
    return ReadBatch(envelope.ts, events, unread)


def begins_with_clear(payload: bytes | memoryview) -> bool:
    """Whether the first event of a batch is AllBlocksCleared: the batch says all that its worker holds.

    A snapshot begins so (docs/kv-events.md). Only the first event is decoded. False for what is no batch.
    """
    try:
        first = _envelope.decode(payload).events[:1]
        return any(isinstance(_read_event(event), AllBlocksCleared) for event in first)
    except _MALFORMED:
        return False


_POSITIONAL = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
        "extra_keys", "group_idx", "kv_cache_spec_kind",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}  # fmt: skip


# Fields that some engines leave out instead of sending nil.
_ABSENT = {"parent_block_hash": None, "lora_id": None, "medium": None, "lora_name": None}


_MALFORMED = (ValueError, TypeError, KeyError, RecursionError, msgspec.MsgspecError)


class _UnknownType(ValueError):
    pass


def _read_event(payload: msgspec.Raw) -> AnyEvent:
    try:
        return _one.decode(payload)
    except _UNREADABLE:
        raw = _loose.decode(payload)
    if isinstance(raw, dict):
        tag, fields = raw["type"], raw
    elif isinstance(raw, list) and raw and isinstance(raw[0], str):
        tag = raw[0]
        fields = dict(zip(_POSITIONAL.get(tag, ()), raw[1:], strict=False))
    else:
        raise ValueError("neither a tagged map nor a positional array")
    if tag == "AllBlocksCleared":
        return AllBlocksCleared()
    if tag not in ("BlockStored", "BlockRemoved"):
        raise _UnknownType(f"unknown event type {tag!r}")
    named = {**_ABSENT, **fields, "type": tag, "block_hashes": [_hash(one) for one in fields["block_hashes"]]}
    if tag == "BlockRemoved":
        return msgspec.convert(named, BlockRemoved)
    if named.get("parent_block_hash") is not None:
        named["parent_block_hash"] = _hash(named["parent_block_hash"])
    return msgspec.convert(named, BlockStored)


def _hash(value: Any) -> int:
    """A block hash, given as a signed or unsigned 64-bit int or as a digest, as a signed 64-bit int."""
    if isinstance(value, bytes) and value:
        return int.from_bytes(value[:8], "big", signed=True)
    if not isinstance(value, int):
        raise TypeError(f"a block hash is an int or bytes, not {type(value).__name__}")
    wrapped = value & 0xFFFF_FFFF_FFFF_FFFF
    return wrapped - (1 << 64) if wrapped >> 63 else wrapped
