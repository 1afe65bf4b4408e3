"""Attempt: one epoch of a simulated request on its workers."""

from __future__ import annotations

from dataclasses import dataclass

from router.index.page_table import Hashes
from router.placement.placement import Placement
from simulator.request import Request


@dataclass(slots=True, eq=False)
class Attempt:
    """A placement of a request, and how far it got. Without a prefill worker D does the request alone."""

    request: Request
    placement: Placement
    prompt: int  # tokens, those forwarded by earlier attempts included
    output: int  # tokens still to come
    hashes: Hashes  # of the prompt's whole pages
    over: bool = False  # nobody waits for it
    lost: bool = False  # it is over because a worker was lost; the request gets another attempt
    reserved: bool = False  # D has memory for it, and P knows where to write
    asked: bool = False  # pages of other tiers and workers were looked for
    arriving: bool = False  # and are on their way
    loaded_at: float = 0.0  # when D has what it loads of its own
    started: bool = False  # the worker that prefills has begun
    computed: int = 0  # prompt tokens with KV on that worker
    first_token_sent: bool = False
    shipped: int = 0  # prompt tokens that were sent to D, or that D had
    kv_bytes: int = 0  # that P wrote on D
    kv_s: float = 0.0  # while it did so
    received: bool = False  # D has the KV of the whole prompt
    last_at: float = -1.0  # when its latest token was made, until it joins D's batch
    taken_over: bool = False  # its KV comes from the worker that decoded it before

    @property
    def alone(self) -> bool:
        """Whether D computes the prompt, too."""
        return self.placement.prefill is None and not self.taken_over

    @property
    def left(self) -> int:
        """Prompt tokens to compute."""
        return self.prompt - self.computed

    def end(self, lost: bool = False) -> None:
        """Nobody waits for it any more."""
        self.over, self.lost = True, lost
