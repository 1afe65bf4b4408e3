"""Generation: one HTTP request's rooms, their text, and what the HTTP side waits for.

A token goes from its room (RoomSink) through its choice's detokenizer straight into the answer, without an
object of its own; the task that serves the request is woken once for all that has come in one turn of the
event loop, and sends it in one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

from common.errors import BatonError, SlowClient
from router.streams.stream import RoomStream
from router.text.detokenize import Detokenizer
from router.text.stop_strings import StopStrings
from wire.messages import FinishReason, SamplingParams, TokenLogprobs

MOST_UNREAD = 1 << 20
"""Bytes of a stream that may wait for a client who does not read; beyond, the request is aborted. (Pausing it
instead would keep its KV cache on a worker for as long as the client likes.)"""


class Submission(msgspec.Struct, frozen=True):
    """A validated request: `n` choices for each prompt. Choice k of prompt j has index j * n + k."""

    request_id: str
    prompts: list[list[int]]
    sampling: SamplingParams  # with a seed
    n: int = 1
    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    extra_key: str = ""
    cache_salt: str = ""
    tenant: str = ""
    priority: int = 0
    session: str = ""
    arrived_ns: int = 0  # Unix clock


class Answer(Protocol):
    """What becomes of the tokens: events of a stream, or one object at the end."""

    unread: int  # bytes that wait to be sent

    def add(
        self,
        index: int,
        text: str,
        tokens: list[int],
        logprobs: list[TokenLogprobs] | None,
        finish: FinishReason | None,
        matched: str | int | None,
    ) -> None:
        """A choice has gained this. `finish` comes with its last; `matched` is the stop string or token."""


class ChoiceOutput:
    """One room's tokens turned into text. Implements RoomSink."""

    def __init__(
        self, index: int, generation: Generation, detokenizer: Detokenizer, stop: tuple[str, ...]
    ) -> None:
        self.index = index
        self.room: RoomStream | None = None  # set right after; the room needs its sink first
        self.tokens = 0
        self._generation = generation
        self._push = detokenizer.push
        self._flush = detokenizer.flush
        self._stops = StopStrings(stop) if stop else None

    def on_tokens(
        self, tokens: list[int], logprobs: list[TokenLogprobs] | None, finish: FinishReason | None
    ) -> None:
        """See RoomSink."""
        text, matched = "", None
        for position, token in enumerate(tokens):
            if finish is FinishReason.STOP and position == len(tokens) - 1:
                matched = token  # a token that stops is not part of the answer's text
                break
            piece = self._push(token)
            if self._stops is None:
                text += piece
                continue
            shown, hit = self._stops.push(piece)
            text += shown
            if hit is not None:
                self._end_at(position + 1, hit, text, tokens, logprobs)
                return
        if finish is not None:
            text += self._rest()
        self.tokens += len(tokens)
        self._generation.add(self.index, text, tokens, logprobs, finish, matched)

    def on_error(self, error: BatonError) -> None:
        """See RoomSink."""
        self._generation.fail(error)

    def _end_at(
        self, count: int, hit: str, text: str, tokens: list[int], logprobs: list[TokenLogprobs] | None
    ) -> None:
        """A stop string was completed by the `count`-th of these tokens."""
        self.tokens += count
        kept = logprobs[:count] if logprobs is not None else None
        assert self.room is not None
        self.room.stop("stop string")
        self._generation.add(self.index, text, tokens[:count], kept, FinishReason.STOP, hit)

    def _rest(self) -> str:
        """The end of the text: an unfinished character, and what looked like a stop string."""
        rest = self._flush()
        if self._stops is None:
            return rest
        shown, hit = self._stops.push(rest)
        return shown if hit is not None else shown + self._stops.flush()


class Generation:
    """The choices of one request. The event loop's callbacks fill `answer`; one task awaits `more`."""

    def __init__(
        self,
        submission: Submission,
        on_first: Callable[[Generation], None],
        on_end: Callable[[Generation], None],
    ) -> None:
        self.submission = submission
        self.outputs: list[ChoiceOutput] = []
        self.answer: Answer | None = None  # set by who submitted, before the loop turns
        self._client_left = False
        self._on_first = on_first
        self._on_end = on_end
        self._open = len(submission.prompts) * submission.n
        self._fresh = False  # something was added since `more` last returned
        self._error: BatonError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._begun = False

    @property
    def ended(self) -> bool:
        """No choice is running."""
        return self._open == 0

    @property
    def complete(self) -> bool:
        """Every choice has ended well: when the answer has been taken now, nothing follows."""
        return self._open == 0 and self._error is None

    def abandoned(self) -> bool:
        """The client has gone."""
        return self._client_left

    async def more(self) -> bool:
        """Wait until the answer has gained something. False when every choice has ended and nothing is left.

        Raises the BatonError that ended the request, after what came before it.
        """
        if not self._fresh and self._error is None and self._open:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._fresh:
            self._fresh = False
            return True
        if self._error is not None:
            raise self._error
        return False

    def add(
        self,
        index: int,
        text: str,
        tokens: list[int],
        logprobs: list[TokenLogprobs] | None,
        finish: FinishReason | None,
        matched: str | int | None,
    ) -> None:
        """From a choice."""
        if not self._begun:
            self._begun = True
            self._on_first(self)
        assert self.answer is not None
        self.answer.add(index, text, tokens, logprobs, finish, matched)
        self._fresh = True
        if finish is not None:
            self._close_one()
        elif self.answer.unread > MOST_UNREAD:
            self.fail(SlowClient(f"more than {MOST_UNREAD} bytes wait for this client to read"))
        self._wake()

    def fail(self, error: BatonError) -> None:
        """One choice failed: the request has. The others are stopped."""
        if self._error is None and self._open:
            self._error = error
            self._stop(f"another choice failed: {error}")
            self._wake()

    def cancel(self) -> None:
        """The client has gone: nobody reads on."""
        if self._open:
            self._client_left = True
            self._stop("the client has gone")
            self._wake()

    def close(self) -> None:
        """Nobody reads on: stop what still runs, and let go of the rooms. Once; nothing may be asked after.

        Rooms, choices and this object know each other. Left so, every request was garbage that only the
        collector frees: its walks took a tenth of the router's time, and meanwhile no memory was used twice.
        """
        self.cancel()
        for output in self.outputs:
            output.room = None
        self.outputs.clear()
        self.answer = None

    def prompt_tokens(self) -> int:
        """Each prompt counts once, however many choices it has."""
        return sum(len(prompt) for prompt in self.submission.prompts)

    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed; of a prompt with several choices, the luckiest's."""
        n = self.submission.n
        cached = [output.room.cached_tokens for output in self.outputs if output.room is not None]
        return sum(max(cached[i : i + n], default=0) for i in range(0, len(cached), n))

    def completion_tokens(self) -> int:
        """Over all choices."""
        return sum(output.tokens for output in self.outputs)

    def _stop(self, reason: str) -> None:
        for output in self.outputs:
            if output.room is not None:
                output.room.stop(reason)
        self._open = 0
        self._on_end(self)

    def _close_one(self) -> None:
        if self._open:
            self._open -= 1
            if not self._open:
                self._on_end(self)

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
