"""What every message is, and the receipt for one."""

from __future__ import annotations

import msgspec

from wire.numbers import Natural


class Message(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", gc=False):
    """Base of everything that goes through a mailbox. A message cannot be part of a reference cycle, so the
    garbage collector does not track it."""


class RoomMessage(Message, frozen=True, omit_defaults=True):
    """About one room in one epoch."""

    room: Natural
    epoch: Natural


def kind_of(message: Message) -> str:
    """The `kind` that a message carries on the wire."""
    tag = message.__struct_config__.tag
    assert isinstance(tag, str), "every message class has a tag"
    return tag


class Receipt(RoomMessage, frozen=True, tag="receipt"):
    """The receiver has taken (or had already taken) the message of kind `of`."""

    of: str
