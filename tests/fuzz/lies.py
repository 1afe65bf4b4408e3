"""Messages that no honest process would send, drawn from the types of wire/messages/.

Half of them have the right types and wrong values: bad addresses, negative pages, old epochs, rooms of
others. The others have a field that is missing, unknown, nested deep or of another type. A liar is a member,
and a member may end workers: Join, Withdraw and Watch name workers that do not exist.
"""

from __future__ import annotations

import random
from typing import Any, get_args

import msgspec
from msgspec import inspect as types

from wire.events import EventBatch
from wire.messages.any_message import AnyMessage
from wire.messages.directory import Announced, AnnounceRefused, Joined, Replaced, View
from wire.senders import NO_MARK

_NUMBERS = (
    0, 1, 2, 3, 7, 15, 16, 17, 255, 256, 319, 320, 1000, 8192, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1,
)  # fmt: skip
_OUTSIDE = (-1, -2, -16, -(2**31), -(2**63), 2**63, 2**64 - 1)  # of the bounds in wire/numbers.py
_RARELY = 0.03
_FLOATS = (0.0, 0.5, 1.0, 1e-300, 1e14)
_WILD = (-0.0, -1.0, 1e300, -1e300, float("inf"), float("-inf"), float("nan"))
_TEXTS = (
    "",
    "x",
    "full",
    "baton",
    "cuda_ipc",
    "shm",
    "tcp",
    "mooncake",
    "\0",
    "\U0001f9d1",
    "a" * 300,
    "m",
    "../..",
    "{}",
)
_ADDRESS_FIELDS = frozenset(
    {"decode", "prefill", "mailbox", "events", "replay", "routers", "waits_for", "blamed"}
)
_BAD_ADDRESSES = (
    "", "x", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:0", "tcp://127.0.0.1:99999", "tcp://127.0.0.1:-1",
    "tcp://*:*", "tcp://[::1]:1", "ipc:///tmp/x", "inproc://wake", "udp://127.0.0.1:5",
    "tcp://no.such.host.invalid:1", "tcp://\0", "pgm://x", "tcp://127.0.0.1:" + "1" * 300,
    "tcp://127.0.0.1:9/" + "0" * 64, "tcp://127.0.0.1:9/" + "g" * 64,
)  # fmt: skip
_OF_THE_DIRECTORY = (View, Joined, Announced, AnnounceRefused, Replaced)
_DEEPEST = 5000
_LONGEST = 4  # of a drawn collection


class Liar:
    """Draws messages. The same seed draws the same ones."""

    def __init__(self, seed: int, addresses: tuple[str, ...], *, proven: bool) -> None:
        """`addresses`: of live processes, which lies name as well as those that nobody has. `proven`: whether
        processes prove who they are."""
        self._random = random.Random(seed)
        self._addresses = addresses
        # Without a secret nobody can prove to be the directory, and its word is taken from anybody.
        kinds = (kind for kind in get_args(AnyMessage) if proven or kind not in _OF_THE_DIRECTORY)
        self._kinds = [types.type_info(kind) for kind in kinds]
        self._batch = types.type_info(EventBatch)
        # Rooms that lies have in common, so that several are about one, and any others.
        self._rooms = (*range(8), 2**62, 2**63 - 1)

    def lie(self) -> bytes:
        """One message as MessagePack."""
        drawn = self._struct(self._random.choice(self._kinds), 0)
        if self._random.random() < 0.5:
            self._spoil(drawn)
        return msgspec.msgpack.encode(drawn)

    def events(self) -> bytes:
        """A batch of KV events, well-typed; or noise."""
        return (
            self.noise()
            if self._random.random() < 0.3
            else msgspec.msgpack.encode(self._struct(self._batch, 0))
        )

    def noise(self) -> bytes:
        """Bytes that are a message by chance only: random ones, or MessagePack of anything, also deep."""
        chance = self._random.random()
        if chance < 0.5:
            return self._random.randbytes(self._random.randrange(200))
        if chance < 0.8:
            return msgspec.msgpack.encode(self._anything(0))
        nesting = self._random.choice(
            (b"\x91", b"\x81\xa1a", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff")
        )
        return nesting * self._random.choice((1, 50, 1100, _DEEPEST))

    def frame(self, head: bytes) -> bytes:
        """A frame for a mailbox (wire/sockets.py): proper, with lying lengths, or no frame at all."""
        chance = self._random.random()
        if chance < 0.1:
            return self._random.randbytes(self._random.randrange(300))
        payloads = [
            self.noise() if chance < 0.3 else self.lie() for _ in range(self._random.choice((1, 1, 2, 5)))
        ]
        frame = head + b"".join(len(one).to_bytes(4, "little") + one for one in payloads)
        if chance < 0.35:
            return frame + self._random.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\1", b"\0\0\0\x80xx"))
        return frame if chance < 0.95 else frame[: self._random.randrange(len(frame))]

    def wrong_head(self) -> bytes:
        """The head of a sender that cannot be answered."""
        text = self._random.choice(_BAD_ADDRESSES).encode()[:255]
        return bytes((len(text),)) + text + NO_MARK

    # -- values by type ------------------------------------------------------------------------------

    def _struct(self, kind: Any, depth: int) -> Any:
        fields = {
            one.encode_name: self._value(one.type, one.name, depth + 1)
            for one in kind.fields
            if one.required or self._random.random() < 0.4
        }
        if kind.array_like:
            return list(fields.values())
        if kind.tag_field is not None:
            fields[kind.tag_field] = kind.tag
        return fields

    def _value(self, kind: Any, name: str, depth: int) -> Any:
        draw = self._random
        if name in ("room", "rooms") and isinstance(kind, types.IntType):
            return draw.choice(self._rooms)
        if name == "epoch":
            return draw.choice((0, 0, 0, 1, 2, 2**40))
        if name in _ADDRESS_FIELDS and isinstance(kind, types.StrType):
            return draw.choice(self._addresses + _BAD_ADDRESSES)
        match kind:
            case types.UnionType():
                return self._value(draw.choice(kind.types), name, depth)
            case types.StructType():
                return self._struct(kind, depth)
            case types.ListType() | types.VarTupleType():
                return [self._value(kind.item_type, name, depth + 1) for _ in range(draw.randrange(_LONGEST))]
            case types.TupleType():
                return [self._value(one, name, depth + 1) for one in kind.item_types]
            case types.DictType():
                keys = [self._value(kind.key_type, name, depth + 1) for _ in range(draw.randrange(_LONGEST))]
                return {key: self._value(kind.value_type, name, depth + 1) for key in keys}
            case types.EnumType():
                return draw.choice([one.value for one in kind.cls])
            case types.LiteralType():
                return draw.choice(kind.values)
            case _:
                return self._scalar(kind)

    def _scalar(self, kind: Any) -> Any:
        draw = self._random
        match kind:
            case types.IntType():
                return draw.choice(_OUTSIDE if draw.random() < _RARELY else _NUMBERS)
            case types.FloatType():
                return draw.choice(_WILD if draw.random() < _RARELY else _FLOATS)
            case types.StrType():
                return draw.choice(_TEXTS)
            case types.BytesType():
                tokens = (
                    draw.choice((0, 1, 97, 255, 319, 320, -1, 2**31 - 1)) for _ in range(draw.randrange(40))
                )
                return b"".join(one.to_bytes(4, "little", signed=True) for one in tokens)
            case types.BoolType():
                return draw.random() < 0.5
            case types.NoneType():
                return None
            case _:
                return self._anything(0)

    # -- spoiling ------------------------------------------------------------------------------------

    def _spoil(self, drawn: dict[str, Any]) -> None:
        """One field is missing, of another type, or unknown and perhaps deep."""
        name = self._random.choice(list(drawn))
        match self._random.randrange(4):
            case 0:
                del drawn[name]
            case 1:
                drawn[name] = self._anything(0)
            case 2:
                drawn["unknown"] = self._anything(0)
            case _:
                drawn["unknown"] = msgspec.Raw(b"\x91" * self._random.choice((20, 900, _DEEPEST)) + b"\0")

    def _anything(self, depth: int) -> Any:
        draw = self._random
        chance = draw.random()
        if depth < 4 and chance < 0.25:
            return [self._anything(depth + 1) for _ in range(draw.randrange(_LONGEST))]
        if depth < 4 and chance < 0.5:
            return {draw.choice(_TEXTS): self._anything(depth + 1) for _ in range(draw.randrange(_LONGEST))}
        return draw.choice((*_NUMBERS, *_OUTSIDE, *_FLOATS, *_WILD, *_TEXTS, None, True, b"\0" * 40))
