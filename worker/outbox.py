"""Outbox: the output of a worker's rooms, kept until the router has acknowledged all of it.

There is one `Tokens` message per step and router, not per request. ZeroMQ may lose messages when a connection
breaks, so a room's output is kept until the router's cumulative `Ack` covers it. The router sends `Resend`
when it sees a gap or nothing.

The whole output is kept while the room runs, for another router that claims the room: a token takes 8 bytes
(its number is shared with the request), and log-probabilities are packed once they are acknowledged. Output
that is retired and never acknowledged (its router died) is dropped when its lease ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from wire.holds import Hold
from wire.messages.any_message import AnyMessage
from wire.messages.rooms import ClaimedRoom, Tokens
from wire.request import FinishReason, OutputDelta, TokenLogprobs, TokenRun

_UNKNOWN = TokenLogprobs(0.0)  # of forced tokens: see ClaimedRoom
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[TokenLogprobs]).decode


class OutputKey(NamedTuple):
    """The room and epoch of an output."""

    room: int
    epoch: int


@dataclass(slots=True)
class _Output:
    router: str
    forced: int  # how many of the tokens were given with the start of the epoch
    cached_tokens: int
    tokens: list[int]  # from the room's first output token on
    packed: list[bytes] = field(default_factory=list)  # log-probabilities that were acknowledged
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # those that follow
    acked: int = 0
    finish: FinishReason | None = None
    expires_at: float | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # until position 0 is acknowledged
    pooled: bytes | None = None  # so long, too

    def run(self, key: OutputKey, start: int) -> TokenRun:
        """Everything from position `start` on."""
        logprobs = self.logprobs_from(start)
        return TokenRun(
            key.room, key.epoch, start, self.tokens[start:], logprobs or None, self.finish,
            self.cached_tokens, self.prompt_logprobs if start == 0 else None,
            self.pooled if start == 0 else None,
        )  # fmt: skip

    def ack(self, upto: int) -> None:
        """The router holds everything below position `upto`."""
        self.acked = max(self.acked, min(upto, len(self.tokens)))
        if self.acked:
            self.prompt_logprobs = self.pooled = None
        known = self.acked - (len(self.tokens) - len(self.logprobs))
        if known > 0:
            self.packed.append(_pack(self.logprobs[:known]))
            del self.logprobs[:known]

    def logprobs_from(self, start: int) -> list[TokenLogprobs]:
        """Of the tokens from position `start` on; empty if they were not asked for."""
        if not self.logprobs and not self.packed:
            return []
        known = len(self.tokens) - len(self.logprobs)  # tokens before those of self.logprobs
        if start >= known:
            return self.logprobs[start - known :]
        earlier = [one for part in self.packed for one in _unpack(part)]
        return [*[_UNKNOWN] * self.forced, *earlier, *self.logprobs][start:]


class Outbox:
    """Output of all rooms of one worker. Used by the engine loop only."""

    def __init__(self, worker: str, send: Callable[[str, AnyMessage], None], lease_s: float) -> None:
        self._worker = worker
        self._send = send
        self._lease_s = lease_s
        self._outputs: dict[OutputKey, _Output] = {}
        self._unsent: dict[str, list[TokenRun]] = {}
        self.swept = 0  # complete outputs that no router has acknowledged in time

    def __len__(self) -> int:
        return len(self._outputs)

    def push(
        self,
        router: str,
        key: OutputKey,
        start: int,
        delta: OutputDelta,
        cached_tokens: int,
        forced: tuple[int, ...] = (),
    ) -> None:
        """Queue output for the next flush. `start` is the position after the room's last token so far.
        `forced` are the output tokens with which the room's epoch began."""
        output = self._outputs.get(key)
        if output is None:
            output = self._outputs[key] = _Output(router, len(forced), cached_tokens, list(forced))
        assert start == len(output.tokens), "a room's output has no gaps and no repeats"
        logprobs = delta.logprobs or None
        output.tokens += delta.tokens
        output.logprobs += logprobs or ()
        if start == 0:
            output.prompt_logprobs, output.pooled = delta.prompt_logprobs, delta.pooled
        if delta.finish is not None:
            output.finish = delta.finish
        run = TokenRun(
            key.room, key.epoch, start, delta.tokens, logprobs, delta.finish, cached_tokens,
            delta.prompt_logprobs, delta.pooled,
        )  # fmt: skip
        self._unsent.setdefault(router, []).append(run)

    def flush(self) -> None:
        """Send what was pushed since the last flush: one message per router."""
        for router, runs in self._unsent.items():
            self._send(router, Tokens(self._worker, runs))
        self._unsent.clear()

    def ack(self, router: str, items: list[tuple[int, int, int]]) -> None:
        """The router holds everything below `upto` of each (room, epoch, upto)."""
        for room, epoch, upto in items:
            key = OutputKey(room, epoch)
            output = self._outputs.get(key)
            if output is None or output.router != router:
                continue
            output.ack(upto)
            if output.expires_at is not None and output.acked == len(output.tokens):
                del self._outputs[key]

    def resend(self, router: str, key: OutputKey, start: int) -> bool:
        """Queue the room's tokens from `start` again. False when there are none for this router, and its end
        is not known."""
        output = self._outputs.get(key)
        if output is None or output.router != router:
            return False
        if output.finish is None and start >= len(output.tokens):
            return False
        self._unsent.setdefault(router, []).append(output.run(key, start))
        return True

    def claim(self, router: str, room: int) -> ClaimedRoom | None:
        """The room's output is sent to `router` from now on. None when there is no output of it."""
        found = [(key, output) for key, output in self._outputs.items() if key.room == room]
        if not found:
            return None
        key, output = max(found, key=lambda one: one[0].epoch)
        if output.router != router:
            output.router, output.acked = router, 0
        return ClaimedRoom(room, key.epoch, output.forced)

    def is_of_another(self, router: str, key: OutputKey) -> bool:
        """Whether the room's output is kept for another router than this one."""
        output = self._outputs.get(key)
        return output is not None and output.router != router

    def logprobs(self, key: OutputKey, start: int) -> list[TokenLogprobs]:
        """The log-probabilities of the room's output from position `start` on, if they were asked for."""
        output = self._outputs.get(key)
        return [] if output is None else output.logprobs_from(start)

    def retire(self, key: OutputKey, now: float) -> None:
        """The room's output is complete. What is not acknowledged is kept for the lease, no longer."""
        output = self._outputs.get(key)
        if output is None or output.expires_at is not None:
            return
        # An Ack does not say whether the router has seen the end, which may have come without a token.
        if output.finish is None and output.acked == len(output.tokens):
            del self._outputs[key]
        else:
            output.expires_at = now + self._lease_s

    def discard(self, key: OutputKey) -> None:
        """Drop the room's output: it was aborted or rejected."""
        self._outputs.pop(key, None)

    def sweep(self, now: float) -> None:
        """Drop retired output whose lease has ended."""
        for key, output in list(self._outputs.items()):
            if output.expires_at is not None and now >= output.expires_at:
                del self._outputs[key]
                self.swept += 1

    def unacknowledged(self, now: float) -> list[Hold]:
        """Output of rooms that are over. What belongs to a room that runs goes with the room."""
        return [
            Hold(
                self._worker, "output", output.router, key.room, key.epoch,
                now - output.expires_at + self._lease_s, output.expires_at - now,
            )
            for key, output in self._outputs.items()
            if output.expires_at is not None
        ]  # fmt: skip
