"""ResumedOutput: a choice whose beginning the client has already (docs/resuming.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from common.errors import BatonError
from router.streams.claims import FoundRoom
from router.streams.generation import ChoiceCounts, ChoiceOutput, Generation
from router.streams.resume import ChoicePosition
from wire.request import FinishReason, OutputDelta

Replay = Callable[[ChoiceCounts, str, OutputDelta], None]
"""Takes what a choice has gained and the client has: it is counted, and not sent again."""


class Resumed(NamedTuple):
    """What the client of a resumed stream has."""

    positions: list[ChoicePosition]
    replay: Replay
    found: dict[int, FoundRoom]  # by number; none: the answer is computed again

    def ended(self) -> list[ChoiceCounts]:
        """The choices that the client has to their end."""
        return [
            ChoiceCounts(index, one.tokens, reasoning_tokens=one.reasoning_tokens)
            for index, one in enumerate(self.positions)
            if one.finished
        ]


class ResumedOutput:
    """Implements RoomSink: reads the known tokens once more, then passes on what follows.

    Text cannot be continued from a token alone: a character may be unfinished there, and the beginning of a
    stop string held back. So all tokens go through the detokenizer from the first on, and the text of the
    known ones, which is a function of them, is dropped.
    """

    def __init__(
        self,
        output: ChoiceOutput,
        counts: ChoiceCounts,
        generation: Generation,
        resumed: Resumed,
    ) -> None:
        self._output = output
        self._counts = counts
        self._generation = generation
        self._known_tokens = resumed.positions[counts.index].tokens  # that have not come yet
        self._replay = resumed.replay

    def on_tokens(self, delta: OutputDelta, cached_tokens: int) -> bool:
        """Add tokens to the answer. Returns True when a stop string ended it."""
        if not self._known_tokens:
            return self._pass_on(delta, cached_tokens)
        known, rest = _split(delta, self._known_tokens)
        self._known_tokens -= len(known.tokens)
        text, known, stopped = self._output.read(known)
        counts = self._counts
        counts.cached_tokens = cached_tokens
        counts.output_tokens += len(known.tokens)
        self._replay(counts, text, known)
        if stopped:  # the client says that it has tokens after the end of the answer, but not the end
            self._generation.add(counts, "", OutputDelta([], None, FinishReason.STOP, known.matched))
            return True
        return self._pass_on(rest, cached_tokens)

    def _pass_on(self, delta: OutputDelta, cached_tokens: int) -> bool:
        """Add everything that came while nobody listened: an event per token, as in a stream that was not
        interrupted. (The text offsets that go with log-probabilities are exact at the beginning of one.)"""
        while len(delta.tokens) > 1:
            first, delta = _split(delta, 1)
            if self._output.on_tokens(first, cached_tokens):
                return True
        if not delta.tokens and delta.finish is None:
            return False
        return self._output.on_tokens(delta, cached_tokens)

    @property
    def accepted(self) -> bool:
        """Whether the request is refused no more."""
        return self._output.accepted

    def on_admitted(self) -> None:
        """The choice's turn has come."""
        self._output.on_admitted()

    def on_error(self, error: BatonError) -> None:
        """The request fails with its choice."""
        self._generation.fail(error)


def _split(delta: OutputDelta, count: int) -> tuple[OutputDelta, OutputDelta]:
    """The first `count` tokens, and what follows them."""
    tokens, logprobs = delta.tokens, delta.logprobs
    first = OutputDelta(tokens[:count], None if logprobs is None else logprobs[:count])
    return first, OutputDelta(
        tokens[count:], None if logprobs is None else logprobs[count:], delta.finish, delta.matched
    )
