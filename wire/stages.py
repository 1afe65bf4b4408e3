"""RequestStage: where a request is in its life (names of the owner's document 1)."""

from __future__ import annotations

import time
from enum import StrEnum

import msgspec

from wire.numbers import Natural


class RequestStage(StrEnum):
    """Each is stamped once, when entered; PREFILL_CHUNKED_FORWARD once per chunk before the last."""

    TOKENIZE = "tokenize"
    TOKENIZER_DISPATCH = "tokenizer_dispatch"
    PREFILL_WAITING = "prefill_waiting"
    PREFILL_FORWARD = "prefill_forward"
    PREFILL_CHUNKED_FORWARD = "prefill_chunked_forward"
    DECODE_LOOP = "decode_loop"
    PREFILL_BOOTSTRAP = "prefill_bootstrap"
    PREFILL_TRANSFER_KV_CACHE = "prefill_transfer_kv_cache"
    DECODE_BOOTSTRAP = "decode_bootstrap"
    DECODE_WAITING = "decode_waiting"
    DECODE_TRANSFERRED = "decode_transferred"
    DECODE_TRANSFER_KV_CACHE = "decode_transfer_kv_cache"  # its pages leave for another decode worker
    DECODE_PAUSED = "decode_paused"
    PEER_FETCH = "peer_fetch"  # waits for pages of its prompt that another worker has


class Stamp(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A stage was entered at `at_ns` nanoseconds of the Unix clock. Clocks of hosts may differ."""

    stage: RequestStage
    at_ns: Natural


def now_ns() -> int:
    """The clock of stamps."""
    return time.time_ns()


def stamp(stage: RequestStage) -> Stamp:
    """The stage, entered now."""
    return Stamp(stage, now_ns())
