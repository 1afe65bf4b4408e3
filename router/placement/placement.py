"""Placement: one epoch of one room on its workers."""

from __future__ import annotations

import msgspec

from router.placement.expected_pages import Expectation
from router.placement.load_estimate import WorkerLoadEstimate
from wire.messages.rooms import FetchSource
from wire.records import WorkerRecord


class Placement(msgspec.Struct, eq=False):  # a dataclass of this many fields is slow to make
    """The workers of an epoch, and what their load estimates count for it until `Placer.close`."""

    decode: WorkerRecord
    prefill: WorkerRecord | None  # None: D computes the prompt, too
    hold_prefill: bool  # D may lack memory, so P is told only after D has reserved its pages
    hit_tokens: int  # prompt tokens that need not be computed, according to the index
    prefill_tokens: int  # the rest of the prompt
    context_tokens: int  # prompt and expected output, on D
    decode_load: WorkerLoadEstimate
    prefill_load: WorkerLoadEstimate  # of P, or of D when it does the request alone
    prefill_ticket: int  # from prefill_load
    decode_ticket: int  # from decode_load
    expected: list[Expectation]  # P's first, where there is a P
    source: FetchSource | None = None  # of what the worker that computes the prompt lacks
    prefilled: bool = False
