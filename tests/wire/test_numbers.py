"""Numbers that no honest process sends do not get past the decoder."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from common.errors import WireError
from tests.router.directory.test_directory import record
from wire.codec import decode, encode
from wire.messages.directory import Announce, Announced
from wire.messages.rooms import Ack, Rejected, RejectKind, Resend

LARGEST = 2**63 - 1


def sent(**fields: Any) -> bytes:
    return msgspec.msgpack.encode(fields)


@pytest.mark.parametrize("number", [-1, 2**63, 2**64 - 1, 1.5, "1"])
def test_a_position_outside_the_bounds_is_refused(number: object) -> None:
    with pytest.raises(WireError):
        decode(sent(kind="resend", room=1, epoch=0, start=number))
    with pytest.raises(WireError):
        decode(sent(kind="ack", items=[[1, 0, number]]))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0, 1e300])
def test_a_duration_that_has_no_order_is_refused(number: float) -> None:
    with pytest.raises(WireError):
        decode(sent(kind="rejected", room=1, epoch=0, why="failed", message="", retry_after_s=number))
    with pytest.raises(WireError):
        decode(sent(kind="announced", worker="w", incarnation=1, lease_s=number))


def test_the_largest_numbers_can_be_sent_on_with_something_added() -> None:
    resend = decode(encode(Resend(LARGEST, 0, LARGEST)))
    assert isinstance(resend, Resend)
    encode(Ack([(resend.room, resend.epoch + 1, resend.start + 1_000_000)]))
    assert decode(encode(Announced("w", LARGEST, 0.0))) == Announced("w", LARGEST, 0.0)
    rejected = Rejected(1, 0, RejectKind.FAILED, "", retry_after_s=3.5)
    assert decode(encode(rejected)) == rejected


def test_a_record_without_pages_is_refused() -> None:
    """Routers take the page size of its first group, and divide by it."""
    announced = msgspec.to_builtins(Announce(record()))
    groups = announced["record"]["groups"]
    assert isinstance(decode(sent(**announced)), Announce)
    for wrong in ([], [{**groups[0], "page_size": 0}]):
        with pytest.raises(WireError):
            decode(sent(**{**announced, "record": {**announced["record"], "groups": wrong}}))
