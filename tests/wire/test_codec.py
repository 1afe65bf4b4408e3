"""Messages survive the wire exactly; nonsense is a WireError; an independent decoder reads the same maps."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import WireError
from wire.checksums import ChecksumMode, PageChecksums
from wire.codec import decode, encode, pack_tokens, unpack_tokens
from wire.messages.any_message import AnyMessage
from wire.messages.rooms import Abort, Decode, FetchSource, Prefill, Tokens
from wire.messages.transfer import GroupTarget, KVDone, KVTarget, TransferEndpoint
from wire.request import FinishReason, GenerateRequest, SamplingParams, TokenLogprobs, TokenRun

REQUEST = GenerateRequest(
    request_id="r-1",
    room=2**62,
    epoch=3,
    prompt=pack_tokens([1, 2, 3]),
    sampling=SamplingParams(max_new_tokens=5, logit_bias={7: -1.5}, stop_token_ids=(9,), top_logprobs=2),
    forced=(4, 5),
    tenant="me",
    cache_salt="salt",
    priority=-1,
)
EXAMPLES: list[AnyMessage] = [
    Prefill(REQUEST, "tcp://d"),
    Decode(REQUEST, "tcp://p"),
    Decode(REQUEST),
    Prefill(REQUEST, "tcp://d", FetchSource("p-2", "tcp://p2", 7)),
    Decode(REQUEST, source=FetchSource("p-2", "tcp://p2", 7)),
    Abort(1, 2, "gone"),
    Tokens("d-1", [TokenRun(1, 2, 0, [5], [TokenLogprobs(-0.5, [(5, -0.5)])], FinishReason.STOP, 16)]),
    KVTarget(
        1,
        2,
        "d-1",
        "host",
        "digest",
        [TransferEndpoint("shm", "@x", {"token": "t"})],
        {"full": GroupTarget(2, [7, 8])},
        30,
    ),
    KVDone(1, 2, 33, 5, 1024, TokenLogprobs(-1.0), 16, PageChecksums(ChecksumMode.ALL, {"full": [123]})),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_round_trip(message: AnyMessage) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_an_independent_decoder_reads_a_tagged_map(message: AnyMessage) -> None:
    raw = msgpack.unpackb(encode(message), strict_map_key=False)
    assert raw["kind"] == message.__struct_config__.tag


@given(st.binary(max_size=200))
def test_random_bytes_never_escape_as_anything_but_wire_error(frame: bytes) -> None:
    try:
        decode(frame)
    except WireError:
        return


def test_wrong_types_are_refused() -> None:
    frame = msgpack.packb({"kind": "abort", "room": "seven", "epoch": 1})
    with pytest.raises(WireError, match="room"):
        decode(frame)


def test_tokens_are_little_endian_int32() -> None:
    assert pack_tokens([1, 258]) == b"\x01\x00\x00\x00\x02\x01\x00\x00"
    assert unpack_tokens(pack_tokens(np.arange(5))).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(WireError):
        unpack_tokens(b"123")


@pytest.mark.parametrize("length", [1, 2, 6])
def test_a_torn_token_array_is_refused(length: int) -> None:
    with pytest.raises(WireError):
        unpack_tokens(bytes(length))
