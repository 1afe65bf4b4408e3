"""What is simulated per request: its line in the trace, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass

from router.index.page_table import Hashes


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
    """A request and its outcome so far. Times are virtual seconds; -1: not yet."""

    number: int
    trace: TraceRequest
    arrived_at: float
    first_at: float = -1.0
    last_at: float = -1.0
    forwarded: int = 0  # output tokens that the router has
    attempts: int = 0
    cached_tokens: int = 0  # of the prompt, where it was computed
    moved_tokens: int = 0  # prompt tokens sent to D
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
