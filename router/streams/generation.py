"""Generation: one HTTP request's rooms, their text, and what the HTTP side waits for.

A token goes from its room (RoomSink) through its choice's detokenizer straight into the answer. The task that
serves the request is woken once for all that has come in one turn of the event loop, and sends it in one
write.

A room knows its ChoiceOutput, which knows the Generation. The Generation knows its rooms by number only, so
that all of them are freed by their reference counts. The garbage collector's walks over what was left to it
took a tenth of the router's time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec.structs import replace

from common.errors import BatonError, SlowClient
from router.text.detokenize import Detokenizer
from router.text.stop_strings import StopStrings
from wire.request import FinishReason, OutputDelta, PromptMarks, RequestCore

MOST_UNREAD = 1 << 20
"""Bytes of a stream that may wait for a client to read. With more, the request is aborted: if it paused, its
KV cache would stay on a worker for as long as the client does not read. What comes before the task that sends
it has run is not the client's fault: a stream that is resumed may get thousands of tokens in one turn."""


class Submission(RequestCore, frozen=True, kw_only=True):
    """A validated request: `n` choices for each prompt. Choice k of prompt j has index j * n + k."""

    prompts: list[list[int]]
    model: str = ""  # its name in the API
    n: int = 1
    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    kept_special: frozenset[int] = frozenset()  # special tokens that the text has nevertheless
    unsaid_behind: frozenset[int] = frozenset()  # those of them that a text for the parser alone follows
    keep_stop: bool = False  # the text has the stop string, or the token, that ended it
    session: str = ""
    opening: str = ""  # what the requests of one conversation have in common; "": the prompt's beginning
    arrived_ns: int = 0  # Unix clock
    traceparent: str = ""  # its span, as W3C's header; "": it has none
    first_room: int = 0  # choice k has room first_room + k
    seed_given: bool = True  # by the client; else the router drew it
    length_given: bool = True  # by the client; else max_new_tokens is what the context leaves
    marks: tuple[PromptMarks, ...] = ()  # of each prompt; (): of none

    @property
    def choice_count(self) -> int:
        """Choices of all prompts together."""
        return len(self.prompts) * self.n


class ChoiceCounts(msgspec.Struct, gc=False):
    """What one choice has come to so far, in tokens."""

    index: int
    output_tokens: int = 0
    cached_tokens: int = 0  # of the prompt: not computed
    reasoning_tokens: int = 0  # of the output, at its end, where its parts are told apart
    grew_ns: int = 0  # Unix clock: when its latest tokens came; 0: none came yet


class Answer(Protocol):
    """What becomes of the tokens: events of a stream, or one object at the end."""

    @property
    def unread(self) -> int:
        """Bytes that wait to be sent."""

    def add(self, choice: ChoiceCounts, text: str, delta: OutputDelta) -> None:
        """A choice, whose counts are up to date, has gained `delta`, and by it `text`."""


class GenerationObserver(Protocol):
    """Is told of a request's beginning and end."""

    def began(self, generation: Generation) -> None:
        """The first token of any choice has come. Called at most once."""

    def grew(self, choice: ChoiceCounts) -> None:
        """Tokens of a choice have come."""

    def ended(self, generation: Generation) -> None:
        """No choice is running any more. Called once."""


class RequestRooms(Protocol):
    """The rooms of one request."""

    def stop(self, reason: str) -> None:
        """End them: no more output is wanted."""

    def leave(self) -> None:
        """Let go of them; they go on at their workers."""


class ChoiceOutput:
    """One room's tokens turned into text. Implements RoomSink."""

    def __init__(
        self,
        counts: ChoiceCounts,
        generation: Generation,
        detokenizer: Detokenizer,
        stop: tuple[str, ...],
        keep_stop: bool = False,
    ) -> None:
        submission = generation.submission
        detokenizer.follow(submission.prompts[counts.index // submission.n])
        self._counts = counts
        self._generation = generation
        self._push = detokenizer.push
        self._flush = detokenizer.flush
        self._stops = StopStrings(stop) if stop else None
        self._unsaid = submission.kept_special  # for the parser alone: stop strings are of what is said
        self._unsaid_behind = submission.unsaid_behind
        self._is_unsaid = False  # the text that comes now
        self._keep_stop = keep_stop
        self._min_tokens = submission.sampling.min_tokens  # stop strings are looked for behind so many
        self._tokens = 0  # that were read

    def on_tokens(self, delta: OutputDelta, cached_tokens: int) -> bool:
        """Add tokens to the answer. Returns True when a stop string ended it."""
        text, delta, stopped = self.read(delta)
        counts = self._counts
        counts.cached_tokens = cached_tokens
        counts.output_tokens += len(delta.tokens)
        self._generation.add(counts, text, delta)
        return stopped

    def read(self, delta: OutputDelta) -> tuple[str, OutputDelta, bool]:
        """The text of the choice's next tokens, those of them that belong to the answer, and whether a stop
        string ended it."""
        tokens, finish, text, stopped = delta.tokens, delta.finish, "", False
        if finish is FinishReason.STOP and tokens:
            delta = replace(delta, matched=tokens[-1])
            if not self._keep_stop:
                tokens = tokens[:-1]
        starts: list[int] | None = [] if len(delta.tokens) > 1 else None
        for position, token in enumerate(tokens):
            if starts is not None:
                starts.append(len(text))
            piece = self._push(token)
            if self._stops is None:
                text += piece
                continue
            if token in self._unsaid:
                text += self._stops.flush() + piece
                self._is_unsaid = token in self._unsaid_behind
                continue
            if self._is_unsaid:
                text += piece
                continue
            if self._tokens + position < self._min_tokens:
                text += self._stops.pass_by(piece)
                continue
            shown, hit = self._stops.push(piece)
            text += shown
            if hit is not None:
                text += hit if self._keep_stop else ""
                delta, stopped = _cut(delta, position + 1, hit), True
                break
        self._tokens += len(delta.tokens)
        if finish is not None and not stopped:
            text += self._rest()
        if starts is not None:
            delta = replace(delta, starts=starts)
        return text, delta, stopped

    @property
    def accepted(self) -> bool:
        """Whether the request is refused no more."""
        return self._generation.accepted

    def on_admitted(self) -> None:
        """The choice's turn has come: the request is refused no more."""
        self._generation.accepted = True

    def on_error(self, error: BatonError) -> None:
        """The request fails with its choice."""
        self._generation.fail(error)

    def _rest(self) -> str:
        """The end of the text: an unfinished character, and what looked like a stop string."""
        rest = self._flush()
        if self._stops is None:
            return rest
        if self._tokens <= self._min_tokens:
            return self._stops.pass_by(rest) + self._stops.flush()
        shown, hit = self._stops.push(rest)
        if hit is None:
            return shown + self._stops.flush()
        return shown + hit if self._keep_stop else shown


def _cut(delta: OutputDelta, count: int, matched: str) -> OutputDelta:
    """The first `count` tokens, with which a stop string was complete."""
    logprobs = delta.logprobs[:count] if delta.logprobs is not None else None
    return OutputDelta(
        delta.tokens[:count], logprobs, FinishReason.STOP, matched, delta.prompt_logprobs, delta.pooled
    )


class Generation:
    """The choices of one request. The event loop's callbacks fill the answer; one task awaits `more`."""

    def __init__(
        self,
        submission: Submission,
        answer: Answer,
        rooms: RequestRooms,
        observer: GenerationObserver,
        known: Sequence[ChoiceCounts] = (),
    ) -> None:
        """`known`: choices that have ended already, for a client that has them."""
        self.submission = submission
        self.accepted = False  # a room of it had its turn: it may still fail, but it is not refused any more
        self.quiet = False  # the last `more` returned because nothing had come for a while
        self.choices = [ChoiceCounts(index) for index in range(submission.choice_count)]
        for choice in known:
            self.choices[choice.index] = choice
        self._answer = answer
        self._rooms = rooms
        self._observer = observer
        self._running = submission.choice_count - len(known)
        self.ends: list[str] = []  # why choices ended, in the order in which they did
        self._begun = False
        self._fresh = False  # something was added since `more` last returned
        self._client_left = False
        self._error: BatonError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._waiter_seen: asyncio.Future[None] | None = None  # by the last `check_quiet`
        self._woken = False  # the task that serves the request was woken, and has not run since

    @property
    def ended(self) -> bool:
        """No choice is running."""
        return self._running == 0

    @property
    def complete(self) -> bool:
        """Every choice has ended well: when the answer has been taken now, nothing follows."""
        return self._running == 0 and self._error is None

    @property
    def error(self) -> BatonError | None:
        """What ended the request, if an error did."""
        return self._error

    @property
    def abandoned(self) -> bool:
        """The client has gone."""
        return self._client_left

    @property
    def waiting(self) -> bool:
        """The task that serves the request is in `more`."""
        return self._waiter is not None

    async def more(self) -> bool:
        """Wait until the answer has gained something. False when every choice has ended and nothing is left.

        True also after `check_quiet` has found that nothing came; then `quiet` is set. Raises the BatonError
        that ended the request, after what came before it.
        """
        self.quiet = False
        if not self._fresh and self._error is None and self._running:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._woken = False
        if self._fresh:
            self._fresh = self.quiet = False
            return True
        if self._error is not None:
            raise self._error
        self.quiet = self.quiet and self._running > 0
        return self.quiet

    def check_quiet(self) -> None:
        """Wake the task that serves an accepted request if it has waited since the last call."""
        waiter = self._waiter
        if self.accepted and waiter is not None and waiter is self._waiter_seen:
            self.quiet = True
            self._wake()
        self._waiter_seen = self._waiter

    def add(self, choice: ChoiceCounts, text: str, delta: OutputDelta) -> None:
        """Called by a choice's output."""
        if not self._begun:
            self._begun = True
            self._observer.began(self)
        self._observer.grew(choice)
        self._answer.add(choice, text, delta)
        self._fresh = True
        if delta.finish is not None:
            self._close_one(delta.finish)
        elif self._answer.unread > MOST_UNREAD and not (self.waiting or self._woken):
            self.fail(SlowClient(f"more than {MOST_UNREAD} bytes wait for this client to read"))
        self._wake()

    def fail(self, error: BatonError) -> None:
        """One choice failed: so has the request, and the other choices are stopped."""
        if self._error is None and self._running:
            self._error = error
            self._rooms.stop(f"the request failed: {error}")
            self._end_all("error")

    def interrupt(self, error: BatonError) -> None:
        """End the request here with an error, and leave its rooms to another router."""
        if self._running:
            self._error = error
            self._rooms.leave()
            self._end_all("interrupted")

    def cancel(self) -> None:
        """The client has gone: stop what still runs. Repeats change nothing."""
        if self._running:
            self._client_left = True
            self._rooms.stop("the client has gone")
            self._end_all("abort")

    def close(self) -> None:
        """Stop what still runs, and let go of the error: its traceback leads back here. Ask nothing after."""
        self.cancel()
        self._error = None

    def prompt_tokens(self) -> int:
        """Each prompt counts once, however many choices it has."""
        return sum(len(prompt) for prompt in self.submission.prompts)

    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed; of a prompt with several choices, the most of any choice."""
        n = self.submission.n
        cached = [choice.cached_tokens for choice in self.choices]
        return sum(max(cached[i : i + n]) for i in range(0, len(cached), n))

    def output_tokens(self) -> int:
        """Over all choices."""
        return sum(choice.output_tokens for choice in self.choices)

    def _end_all(self, end: str) -> None:
        self.ends += [end] * self._running
        self._running = 0
        self._end()

    def _close_one(self, end: str) -> None:
        if self._running:
            self._running -= 1
            self.ends.append(end)
            if not self._running:
                self._end()

    def _end(self) -> None:
        self._wake()  # first: nobody wakes the task later, should the observer fail
        self._observer.ended(self)

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            self._woken = True
            waiter.set_result(None)
