"""The states in which a fault finds a request: how the gates hold it there, and which stamps show that."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tests.chaos.observed import DECODE, FIRST, LAST, MIDDLE, MOVE, Observed
from wire.stages import RequestStage as Stage

_STAYS_S = 0.15  # a room that has not left a stage for so long waits there
_SLOW_DECODE = {DECODE: 0.02}


@dataclass(frozen=True)
class State:
    """`side`: the role on whose workers it shows. `reached`: whether a worker has a room in the state now.

    `long_prompts`: requests that do not all fit in the decode workers' memory. `scarce`: the stack whose
    decode workers have too little memory for what they admit.
    """

    name: str
    side: str
    reached: Callable[[Observed], bool]
    hold_p: frozenset[str] = frozenset()
    hold_d: frozenset[str] = frozenset()
    pace_p: Mapping[str, float] = field(default_factory=dict)
    pace_d: Mapping[str, float] = field(default_factory=dict)
    long_prompts: bool = False
    scarce: bool = False


def _queued(seen: Observed) -> bool:
    return bool(seen.rooms_in(Stage.PREFILL_WAITING, (Stage.PREFILL_CHUNKED_FORWARD, Stage.PREFILL_FORWARD)))


# A forward's stage begins before the forward: the gates hold it with its stamp.


def _first_chunk(seen: Observed) -> bool:
    return FIRST in seen.held and _in_chunks(seen)


def _between_chunks(seen: Observed) -> bool:
    return MIDDLE in seen.held and _in_chunks(seen)


def _in_chunks(seen: Observed) -> bool:
    return bool(seen.rooms_in(Stage.PREFILL_CHUNKED_FORWARD, (Stage.PREFILL_FORWARD,)))


def _last_chunk(seen: Observed) -> bool:
    # Pages of earlier chunks may be on their way already: their stamp says nothing here.
    return LAST in seen.held and bool(seen.rooms_in(Stage.PREFILL_FORWARD, ()))


def _transferring(seen: Observed) -> bool:
    return MOVE in seen.held and bool(seen.rooms_in(Stage.PREFILL_TRANSFER_KV_CACHE, ()))


def _bootstrap(seen: Observed) -> bool:
    since = time.time_ns() - int(_STAYS_S * 1e9)
    return any(at < since for _, at in seen.rooms_in(Stage.DECODE_BOOTSTRAP, (Stage.DECODE_WAITING,)))


def _waiting(seen: Observed) -> bool:
    since = time.time_ns() - int(_STAYS_S * 1e9)
    return any(at < since for _, at in seen.rooms_in(Stage.DECODE_WAITING, (Stage.DECODE_TRANSFERRED,)))


def _decoding(seen: Observed) -> bool:
    since = time.time_ns() - int(1e9)  # one that entered the batch long ago may have left it
    return any(at > since for _, at in seen.rooms_in(Stage.DECODE_LOOP, ()))


def _retracted(seen: Observed) -> bool:
    return bool(seen.retracted)


_WHOLE_PREFILL = frozenset({FIRST, MIDDLE, LAST})

STATES = {
    state.name: state
    for state in (
        # Not held: a worker whose loop waits in a forward reads no mail, so nothing would be queued.
        State("queued", "P", _queued, pace_p=dict.fromkeys(_WHOLE_PREFILL, 0.2)),
        State("bootstrap", "D", _bootstrap, hold_p=_WHOLE_PREFILL, long_prompts=True),
        State("first chunk", "P", _first_chunk, hold_p=frozenset({FIRST})),
        State("between chunks", "P", _between_chunks, hold_p=frozenset({MIDDLE})),
        State("transferring", "P", _transferring, hold_p=frozenset({MOVE})),
        State("last chunk", "P", _last_chunk, hold_p=frozenset({LAST})),
        State("waiting", "D", _waiting, hold_p=_WHOLE_PREFILL),
        State("decoding", "D", _decoding, pace_d=_SLOW_DECODE),
        State("retracted", "D", _retracted, pace_d={DECODE: 0.005}, scarce=True),
        State("draining", "D", _decoding, hold_d=frozenset({MOVE}), pace_d=_SLOW_DECODE),
    )
}
"""By name. Draining begins with requests that decode; the victim is then told to leave."""
