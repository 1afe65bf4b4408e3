"""Outbox: the output of a worker's rooms, kept until the router has acknowledged it.

There is one `Tokens` message per step and router, not per request. ZeroMQ may lose messages when a connection
breaks, so a room's output is kept until the router's cumulative `Ack` covers it. The router sends `Resend`
when it sees a gap or nothing. Output that is retired and never acknowledged (its router died) is dropped when
its lease ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from wire.messages import AnyMessage, Tokens
from wire.request import FinishReason, OutputDelta, TokenLogprobs, TokenRun


class OutputKey(NamedTuple):
    """The room and epoch of an output."""

    room: int
    epoch: int


@dataclass(slots=True)
class _Output:
    router: str
    base: int  # output position of tokens[0]; everything below is acknowledged
    cached_tokens: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    expires_at: float | None = None

    def run(self, key: OutputKey, start: int) -> TokenRun:
        skip = max(0, start - self.base)
        return TokenRun(
            key.room,
            key.epoch,
            self.base + skip,
            self.tokens[skip:],
            self.logprobs[skip:] or None,
            self.finish,
            self.cached_tokens,
        )


class Outbox:
    """Output of all rooms of one worker. Used by the engine loop only."""

    def __init__(self, worker: str, send: Callable[[str, AnyMessage], None], lease_s: float) -> None:
        self._worker = worker
        self._send = send
        self._lease_s = lease_s
        self._outputs: dict[OutputKey, _Output] = {}
        self._unsent: dict[str, list[TokenRun]] = {}

    def __len__(self) -> int:
        return len(self._outputs)

    def push(self, router: str, key: OutputKey, start: int, delta: OutputDelta, cached_tokens: int) -> None:
        """Queue output for the next flush. `start` is the position after the room's last token so far."""
        output = self._outputs.get(key)
        if output is None:
            output = self._outputs[key] = _Output(router, start, cached_tokens)
        assert start == output.base + len(output.tokens), "a room's output has no gaps and no repeats"
        logprobs = delta.logprobs or None
        output.tokens += delta.tokens
        output.logprobs += logprobs or ()
        if delta.finish is not None:
            output.finish = delta.finish
        run = TokenRun(key.room, key.epoch, start, delta.tokens, logprobs, delta.finish, cached_tokens)
        self._unsent.setdefault(router, []).append(run)

    def flush(self) -> None:
        """Send what was pushed since the last flush: one message per router."""
        for router, runs in self._unsent.items():
            self._send(router, Tokens(self._worker, runs))
        self._unsent.clear()

    def ack(self, items: list[tuple[int, int, int]]) -> None:
        """The router holds everything below `upto` of each (room, epoch, upto)."""
        for room, epoch, upto in items:
            key = OutputKey(room, epoch)
            output = self._outputs.get(key)
            if output is None:
                continue
            held = min(max(0, upto - output.base), len(output.tokens))
            del output.tokens[:held]
            del output.logprobs[:held]
            output.base += held
            if output.expires_at is not None and not output.tokens:
                del self._outputs[key]

    def resend(self, key: OutputKey, start: int) -> bool:
        """Queue the room's tokens from `start` again. False when there are none, and its end is not known."""
        output = self._outputs.get(key)
        if output is None or (output.finish is None and start >= output.base + len(output.tokens)):
            return False
        self._unsent.setdefault(output.router, []).append(output.run(key, start))
        return True

    def retire(self, key: OutputKey, now: float) -> None:
        """The room's output is complete. What is not acknowledged is kept for the lease, no longer."""
        output = self._outputs.get(key)
        if output is not None and output.expires_at is None:
            output.expires_at = now + self._lease_s

    def discard(self, key: OutputKey) -> None:
        """Drop the room's output: it was aborted or rejected."""
        self._outputs.pop(key, None)

    def sweep(self, now: float) -> None:
        """Drop retired output whose lease has ended."""
        for key, output in list(self._outputs.items()):
            if output.expires_at is not None and now >= output.expires_at:
                del self._outputs[key]
