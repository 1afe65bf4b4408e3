"""NodePolicy: what a node decides at the scheduler's seams. prefill_node and decode_node implement it."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from scheduler.req import Req
from wire.messages import OutputDelta, RejectKind


class AfterPrefill(StrEnum):
    """What becomes of a request whose prefill is done."""

    DECODE = "decode"  # stays here and decodes
    HAND_OFF = "hand_off"  # the policy holds it, with row, pages and lock, until release or park


class NodePolicy(Protocol):
    """Called on the thread that calls `Scheduler.step` (or `add`). May call the scheduler's methods."""

    def on_chunk(self, req: Req) -> None:
        """A chunk before the last has landed: KV [0, req.kv_committed_len) is valid and cached."""
        ...

    def on_prefilled(self, req: Req) -> AfterPrefill:
        """The whole prefill is valid and cached. Its token went to on_tokens before, and did not end it.

        Called again when a parked request is readmitted, or a retracted one has been prefilled again.
        """
        ...

    def on_tokens(self, req: Req, start: int, delta: OutputDelta) -> None:
        """Output from position `start` on. Each position is reported once, in order, and nothing follows
        `delta.finish`."""
        ...

    def on_failed(self, req: Req, why: RejectKind, message: str) -> None:
        """The request has ended without finishing; the scheduler has let go of it."""
        ...
