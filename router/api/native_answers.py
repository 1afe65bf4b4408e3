"""What /generate answers: choices with all that they have said, and events that repeat it."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from msgspec.structs import replace

from common.errors import RequestFailed
from router.api.answering import DONE
from router.api.collection import CollectedChoice, Collection
from router.api.event_ids import EventIds
from router.api.event_json import encode_event
from router.api.event_queue import EventQueue
from router.streams.generation import ChoiceCounts, Generation, Submission
from wire.request import FinishReason, OutputDelta, SamplingParams, TokenLogprobs

_MOST_REPEATED = 1 << 18
"""Bytes of a stream's events that wait for its client; with more, those that others repeat are dropped."""


class OutputLogprobs:
    """The log-probabilities of a choice's output, as JSON that each event of a stream repeats: a token's are
    encoded once."""

    def __init__(self, sampling: SamplingParams) -> None:
        """`sampling` says which were asked for."""
        self._count = sampling.top_logprobs or 0
        self._has_named = bool(sampling.logprob_token_ids)
        self._chosen = bytearray()
        self._best = bytearray()
        self._named = bytearray()

    def add(self, delta: OutputDelta) -> None:
        """Add those of a delta, if they were asked for."""
        if delta.logprobs is None:
            return
        for token, entry in zip(delta.tokens, delta.logprobs, strict=True):
            others = [[logprob, other, None] for other, logprob in entry.top]
            self._chosen += msgspec.json.encode([entry.logprob, token, None]) + b","
            self._best += msgspec.json.encode(others[: self._count]) + b","
            if self._has_named:
                self._named += msgspec.json.encode(others[self._count :]) + b","

    def told(self) -> dict[str, msgspec.Raw]:
        """All, by their names in an answer."""
        lists = {"output_token_logprobs": self._chosen, "output_top_logprobs": self._best}
        if self._has_named:
            lists["output_token_ids_logprobs"] = self._named
        return {name: msgspec.Raw(b"[" + entries[:-1] + b"]") for name, entries in lists.items()}


class NativeEvents(EventQueue):
    """Events that repeat the whole text so far, as SGLang's do. Implements StreamedAnswer.

    Each says by `index` to which choice it belongs, and says all that earlier ones of its choice do. So when
    many wait for a client, the newest ones are enough, and no client is slow for their length.
    """

    def __init__(self, submission: Submission, ids: EventIds) -> None:
        super().__init__()
        self._submission = submission
        self._ids = ids
        self.waiting = ids.waiting
        self._collection = Collection(submission.choice_count)
        self._logprobs = [OutputLogprobs(submission.sampling) for _ in self._collection.choices]
        self._newest: dict[int, int] = {}  # choice -> where in `events` its newest is

    def add(self, choice: ChoiceCounts, text: str, delta: OutputDelta) -> None:
        """Add one event."""
        self.replay(choice, text, delta)
        collected = self._collection.choices[choice.index]
        answer = answer_of(self._submission, choice, collected, self._logprobs[choice.index])
        event_id = self._ids.after(choice, delta.finish is not None)
        self._newest[choice.index] = len(self.events)
        self.put(event_id + b"data: " + encode_event({**answer, "index": choice.index}) + b"\n\n")
        if self.unread > _MOST_REPEATED:
            self._drop_repeated()

    def replay(self, choice: ChoiceCounts, text: str, delta: OutputDelta) -> None:
        """Events that follow repeat this part, too."""
        self._logprobs[choice.index].add(delta)
        without = delta if delta.logprobs is None else replace(delta, logprobs=None)  # they are kept as JSON
        self._collection.add(choice, text, without)

    def take(self) -> bytes:
        self._newest.clear()
        return super().take()

    def end(self, _: Generation) -> bytes:
        """The last event: [DONE]."""
        return DONE

    def _drop_repeated(self) -> None:
        """Keep the newest event of each choice. What is left does not count as unread."""
        kept = sorted(self._newest.items(), key=lambda one: one[1])
        self.events[:] = [self.events[at] for _, at in kept]  # the same list: nothing was taken
        self._newest = {choice: at for at, (choice, _) in enumerate(kept)}
        self.unread = 0


def answer_of(
    submission: Submission,
    counts: ChoiceCounts,
    collected: CollectedChoice,
    logprobs: OutputLogprobs,
    scored_from: int = -1,
) -> dict[str, Any]:
    """What an answer, or an event of a stream, says of a choice. `scored_from`: the place of the first token
    of the prompt whose log-probability is told; -1: none is."""
    prompt = submission.prompts[counts.index // submission.n]
    meta: dict[str, Any] = {
        "id": submission.request_id,
        "finish_reason": _finish(collected),
        "prompt_tokens": len(prompt),
        "completion_tokens": len(collected.tokens),
        "cached_tokens": counts.cached_tokens,
        "e2e_latency": (time.time_ns() - submission.arrived_ns) / 1e9,
    }
    if submission.sampling.top_logprobs is not None:
        meta |= logprobs.told()
    if submission.sampling.prompt_logprobs is not None:
        meta |= _input_logprobs(prompt, collected.prompt_logprobs, scored_from)
    return {"text": collected.text, "output_ids": collected.tokens, "meta_info": meta}


def _input_logprobs(prompt: list[int], scores: list[TokenLogprobs] | None, first: int) -> dict[str, Any]:
    """Those of the prompt's tokens from place `first` on; the very first has none."""
    if scores is None:
        raise RequestFailed("the prompt's log-probabilities were lost with a worker: ask again")
    entries: list[TokenLogprobs | None] = [None, *scores]
    pairs = list(zip(prompt, entries, strict=True))[first:]
    return {
        "input_token_logprobs": [[entry and entry.logprob, token, None] for token, entry in pairs],
        "input_top_logprobs": [
            entry and [[logprob, other, None] for other, logprob in entry.top] for _, entry in pairs
        ],
    }


def _finish(choice: CollectedChoice) -> dict[str, Any] | None:
    if choice.finish is None:
        return None
    if choice.finish is FinishReason.LENGTH:
        return {"type": "length", "length": len(choice.tokens)}
    return {"type": "stop", "matched": choice.matched}
