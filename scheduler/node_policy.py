"""NodePolicy: what a scheduler asks and tells the worker that it runs in. See worker/role.py."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from scheduler.req import Req
from wire.messages.rooms import RejectKind
from wire.request import OutputDelta


class AfterPrefill(StrEnum):
    """What becomes of a request whose prefill is done."""

    DECODE = "decode"  # it stays here and decodes
    HAND_OFF = "hand_off"  # the policy holds it, with row, pages and lock, until release or park


class NodePolicy(Protocol):
    """Called on the thread that calls `Scheduler.step` (or `add`). May call the scheduler's methods."""

    def on_chunk(self, req: Req) -> None:
        """A chunk, not the last, has been computed: KV [0, req.kv_committed_len) is valid and cached."""
        ...

    def on_prefilled(self, req: Req) -> AfterPrefill:
        """The whole prefill is valid and cached; on_tokens was called before and did not end the request.

        Called again when a parked request has been readmitted, or a retracted one prefilled again.
        """
        ...

    def on_tokens(self, req: Req, start: int, delta: OutputDelta) -> None:
        """Output from position `start` on. Each position is reported once, in order, and nothing follows
        `delta.finish`."""
        ...

    def on_failed(self, req: Req, why: RejectKind, message: str) -> None:
        """The request is over without a finish; the scheduler does not know it any more."""
        ...
