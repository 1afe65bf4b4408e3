"""What is simulated per request: its entry in the trace, each try, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from router.index.page_table import Hashes
from router.placement.placement import Placement
from simulator.link import Link


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    hashes: Hashes  # of the prompt's whole pages
    session: str = ""
    tenant: str = ""
    priority: int = 0


@dataclass(slots=True)
class Request:
    """One request on its way, and what became of it. Times are virtual seconds, -1: not yet."""

    number: int
    trace: TraceRequest
    arrived_at: float
    first_at: float = -1.0
    last_at: float = -1.0
    forwarded: int = 0  # output tokens so far
    tries: int = 0
    cached_tokens: int = 0  # of the prompt, where it was computed
    moved_tokens: int = 0
    prefill: str | None = None
    decode: str = ""
    ended: bool = False
    rejected: bool = False

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token."""
        return self.first_at - self.arrived_at

    @property
    def itl(self) -> float:
        """Mean seconds between its tokens; 0 for a single one."""
        return (self.last_at - self.first_at) / max(1, self.trace.output_tokens - 1)


@dataclass(slots=True)
class AttemptMemory:
    """What a try keeps of one worker's memory."""

    pages: int = 0  # leading ones of its prompt, locked
    tokens: int = 0  # outside the cache


class AttemptWorker(Protocol):
    """A modelled worker, as its tries and routers see it (simulator/worker.py)."""

    link: Link

    def prefill(self, one: Attempt) -> None:
        """The router wants this prompt computed here."""

    def decode(self, one: Attempt) -> None:
        """The router wants this request decoded here, and prefilled if nobody else does."""

    def target(self, one: Attempt) -> None:
        """D has told where to write."""

    def received(self, one: Attempt) -> None:
        """All KV of a prompt has come."""

    def abort(self, one: Attempt) -> None:
        """That try is over, and `over` says so already."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One epoch of a request: a placement, and how far it got. Without a prefill worker D does it alone."""

    request: Request
    placement: Placement
    prefill: AttemptWorker | None
    decode: AttemptWorker
    prompt: int  # tokens, forced ones of an earlier try included
    output: int  # tokens still to come
    hashes: Hashes  # of the prompt's whole pages
    over: bool = False  # nobody waits for it
    lost: bool = False  # and that because a worker was lost: the request has another try
    reserved: bool = False  # D has memory for it, and P knows where to write
    started: bool = False  # its prompt, on the worker that prefills
    computed: int = 0  # prompt tokens with KV there
    told: bool = False  # the first token is out
    shipped: int = 0  # prompt tokens sent, or with D anyway
    received: bool = False  # D has all of it
    last_at: float = -1.0  # its latest token, until it has joined D's batch
    at_prefill: AttemptMemory = field(default_factory=AttemptMemory)
    at_decode: AttemptMemory = field(default_factory=AttemptMemory)  # the same object when D does it alone

    @property
    def left(self) -> int:
        """Prompt tokens to compute."""
        return self.prompt - self.computed
