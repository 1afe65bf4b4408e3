"""Messages as MessagePack: typed, validated on decode. Nothing is unpickled."""

from __future__ import annotations

import struct

import msgspec
import numpy as np
import numpy.typing as npt

from common.errors import WireError
from wire.messages.any_message import AnyMessage

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """One message as one MessagePack map with its `kind`."""
    return _encoder.encode(message)


def decode(frame: bytes | memoryview) -> AnyMessage:
    """The message in a frame. Raises WireError when it is none of AnyMessage."""
    try:
        return _decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"undecodable message: {error}") from error


def pack_tokens(tokens: npt.ArrayLike) -> bytes:
    """Token ids as int32 little-endian bytes: the form of prompts on the wire and of page hashes."""
    if isinstance(tokens, list):
        return struct.pack(f"<{len(tokens)}i", *tokens)  # a third of numpy's time for a list of Python ints
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()


def unpack_tokens(packed: bytes) -> npt.NDArray[np.int32]:
    """The token ids in `packed`, as a read-only view. Raises WireError for a torn array."""
    if len(packed) % 4:
        raise WireError(f"a token array of {len(packed)} bytes is not a whole number of int32")
    return np.frombuffer(packed, dtype="<i4")
