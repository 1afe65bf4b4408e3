"""Answers: whole ones as objects, streamed ones as bytes around a prefix encoded once per choice."""

from __future__ import annotations

from typing import Any

from common.errors import RequestFailed
from router.api.answering import DONE
from router.api.collection import CollectedChoice
from router.api.event_ids import EventIds
from router.api.event_json import encode_event
from router.api.event_queue import EventQueue
from router.api.openai.logprobs import (
    TextOffsets,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from router.api.openai.shown import Shown
from router.streams.generation import ChoiceCounts, Generation, Submission
from router.text.detokenize import DetokenizerFactory
from wire.request import FinishReason, OutputDelta, TokenLogprobs


def usage(generation: Generation) -> dict[str, Any]:
    """OpenAI's usage object."""
    return _usage(generation.prompt_tokens(), generation.output_tokens(), generation.cached_tokens())


def _usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Style:
    """What differs between chat and completions: object names and the inside of a choice."""

    object_name: str
    chunk_name: str
    id_prefix: str
    before_first: bytes  # between `"index":N` and the text of a choice's first chunk
    before: bytes  # and of those that follow
    after: bytes  # between the text and the value of "logprobs"

    def __init__(self, detokenizers: DetokenizerFactory, shown: Shown) -> None:
        self._names = TokenNames(detokenizers, shown.ids_as_names)
        self.shown = shown

    def choice(self, index: int, collected: CollectedChoice, submission: Submission) -> dict[str, Any]:
        """A whole choice."""
        raise NotImplementedError

    def prompt_ids(self, index: int, submission: Submission) -> dict[str, Any]:
        """What a choice has of its prompt, if it was asked for."""
        raise NotImplementedError

    def beside_choices(self, submission: Submission, scores: list[TokenLogprobs] | None) -> dict[str, Any]:
        """What the answer has of the prompt beside its choices, if it was asked for."""
        raise NotImplementedError

    @property
    def form(self) -> str:
        """A name of the kind of the chunks."""
        return self.chunk_name + self.shown.form

    def told(
        self,
        index: int,
        text: str,
        finish: FinishReason | None,  # noqa: ARG002
        is_first: bool,
        submission: Submission,
    ) -> str | dict[str, Any]:
        """What a chunk says of the next piece of a choice's text."""
        return self.opening(index, submission) + text if is_first else text

    def finish(self, index: int, finish: FinishReason | None) -> str | None:  # noqa: ARG002
        """Why a choice has ended, as a chunk says it."""
        return finish

    def opening(self, index: int, submission: Submission) -> str:  # noqa: ARG002
        """What the text of a choice begins with, before its output."""
        return ""

    def usage(self, generation: Generation) -> dict[str, Any]:
        """OpenAI's usage object."""
        return usage(generation)

    def token_ids(self, tokens: list[int]) -> dict[str, Any]:
        """The ids of an output, if they were asked for."""
        return {"token_ids": tokens} if self.shown.token_ids else {}

    def logprobs(
        self, index: int, tokens: list[int], logprobs: list[TokenLogprobs], submission: Submission
    ) -> Any:
        """The log-probabilities of a chunk."""
        raise NotImplementedError

    def replayed(self, index: int, text: str, tokens: list[int], submission: Submission) -> None:
        """The client has this text, of these tokens, already."""


def _known(scores: list[TokenLogprobs] | None, best: int | None) -> list[TokenLogprobs]:
    """With so many of the best tokens: one request may ask for more beside its echo, or in it.

    Raises RequestFailed if the worker that computed them was lost before they came.
    """
    if scores is None:
        raise RequestFailed("the prompt's log-probabilities were lost with a worker: ask again")
    return [TokenLogprobs(one.logprob, one.top[:best]) for one in scores]


class ChatStyle(Style):
    """chat.completion."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"
    before_first = b',"delta":{"role":"assistant","content":'
    before = b',"delta":{"content":'
    after = b'},"logprobs":'

    def choice(self, index: int, collected: CollectedChoice, submission: Submission) -> dict[str, Any]:  # noqa: ARG002
        logprobs = None
        if self.shown.logprobs:
            logprobs = chat_logprobs(self._names, collected.tokens, collected.logprobs)
        return {
            "index": index,
            "message": {"role": "assistant", "content": collected.text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": collected.finish,
            **self.token_ids(collected.tokens),
        }

    def prompt_ids(self, index: int, submission: Submission) -> dict[str, Any]:  # noqa: ARG002
        return {}

    def beside_choices(self, submission: Submission, scores: list[TokenLogprobs] | None) -> dict[str, Any]:
        prompt = submission.prompts[0]
        told: dict[str, Any] = {"prompt_token_ids": prompt} if self.shown.token_ids else {}
        if (best := self.shown.prompt_logprobs) is not None:
            told["prompt_logprobs"] = prompt_logprobs(self._names, prompt, _known(scores, best))
        return told

    def logprobs(
        self,
        index: int,  # noqa: ARG002
        tokens: list[int],
        logprobs: list[TokenLogprobs],
        submission: Submission,  # noqa: ARG002
    ) -> Any:
        return chat_logprobs(self._names, tokens, logprobs)


class CompletionStyle(Style):
    """text_completion."""

    object_name = "text_completion"
    chunk_name = "text_completion"
    id_prefix = "cmpl-"
    before_first = b',"text":'
    before = b',"text":'
    after = b',"logprobs":'

    def __init__(
        self,
        detokenizers: DetokenizerFactory,
        shown: Shown,
        echoed: list[str] | None = None,
        outputs: bool = True,
    ) -> None:
        """`echoed`: the texts of the prompts, with which those of their choices begin. Without `outputs` the
        one token that a worker computes at least is left out."""
        super().__init__(detokenizers, shown)
        self._detokenizers = detokenizers
        self._offsets: dict[int, TextOffsets] = {}  # choice -> of what has been streamed
        self._echoed = echoed
        self._outputs = outputs

    def choice(self, index: int, collected: CollectedChoice, submission: Submission) -> dict[str, Any]:
        prompt = submission.prompts[index // submission.n]
        tokens = collected.tokens if self._outputs else []
        told: dict[str, Any] = {
            "index": index,
            "text": self.opening(index, submission) + (collected.text if self._outputs else ""),
            "logprobs": self._all_logprobs(submission, prompt, tokens, collected)
            if self.shown.logprobs
            else None,
            "finish_reason": collected.finish if self._outputs else FinishReason.LENGTH,
            **self.token_ids(tokens),
            **self.prompt_ids(index, submission),
        }
        if (best := self.shown.prompt_logprobs) is not None:
            scores = _known(collected.prompt_logprobs, best)
            told["prompt_logprobs"] = prompt_logprobs(self._names, prompt, scores)
        return told

    def _all_logprobs(
        self, submission: Submission, prompt: list[int], tokens: list[int], collected: CollectedChoice
    ) -> dict[str, Any]:
        entries: list[TokenLogprobs | None] = [*collected.logprobs[: len(tokens)]]
        if self._echoed is not None:
            scores = _known(collected.prompt_logprobs, submission.sampling.top_logprobs)
            tokens, entries = prompt + tokens, [None, *scores, *entries]
            prompt = []
        return completion_logprobs(self._names, tokens, entries, self._new_offsets(submission, prompt))

    def opening(self, index: int, submission: Submission) -> str:
        return "" if self._echoed is None else self._echoed[index // submission.n]

    def usage(self, generation: Generation) -> dict[str, Any]:
        if self._outputs:
            return usage(generation)
        return _usage(generation.prompt_tokens(), 0, generation.cached_tokens())

    def prompt_ids(self, index: int, submission: Submission) -> dict[str, Any]:
        prompt = submission.prompts[index // submission.n]
        return {"prompt_token_ids": prompt} if self.shown.token_ids else {}

    def beside_choices(self, submission: Submission, scores: list[TokenLogprobs] | None) -> dict[str, Any]:  # noqa: ARG002
        return {}

    def logprobs(
        self, index: int, tokens: list[int], logprobs: list[TokenLogprobs], submission: Submission
    ) -> Any:
        return completion_logprobs(self._names, tokens, logprobs, self._streamed(index, submission))

    def replayed(self, index: int, text: str, tokens: list[int], submission: Submission) -> None:  # noqa: ARG002
        self._streamed(index, submission).of(tokens)

    def _streamed(self, index: int, submission: Submission) -> TextOffsets:
        found = self._offsets.get(index)
        if found is None:
            prompt = submission.prompts[index // submission.n]
            found = self._offsets[index] = self._new_offsets(submission, prompt)
        return found

    def _new_offsets(self, submission: Submission, before: list[int]) -> TextOffsets:
        """Of tokens that follow these."""
        detokenizer = self._detokenizers.make(submission.skip_special_tokens)
        detokenizer.follow(before)
        return TextOffsets(detokenizer)


class SseWriter(EventQueue):
    """One request's events, in order. Implements StreamedAnswer. All but text and finish is encoded once."""

    def __init__(self, style: Style, submission: Submission, created: int, ids: EventIds) -> None:
        super().__init__()
        head = {
            "id": style.id_prefix + submission.request_id,
            "object": style.chunk_name,
            "created": created,
            "model": submission.model,
        }
        shown = style.shown
        self._head = b"data: " + encode_event(head)[:-1]
        self._end = b'}],"usage":null}\n\n' if shown.usage else b"}]}\n\n"
        self._running = style.after + b'null,"finish_reason":null' + self._end
        self._is_plain = not (shown.running_usage or shown.token_ids)  # most events differ in their text only
        self._submission = submission
        self._style = style
        self._ids = ids
        self.waiting = ids.waiting
        self._before: dict[int, bytes] = {}  # choice -> what its events begin with, after the first

    def add(self, choice: ChoiceCounts, text: str, delta: OutputDelta) -> None:
        """Add one event."""
        event_id = self._ids.after(choice, delta.finish is not None)
        before = self._before.get(choice.index)
        is_first = before is None
        if before is None:
            before = self._first(choice.index)
        told = self._style.told(choice.index, text, delta.finish, is_first, self._submission)
        if (
            self._is_plain
            and delta.finish is None
            and (delta.logprobs is None or not self._style.shown.logprobs)
        ):
            event = event_id + before + encode_event(told) + self._running
        else:
            event = event_id + before + encode_event(told) + self._rest(choice, delta, is_first)
        self.put(event)

    def replay(self, choice: ChoiceCounts, text: str, delta: OutputDelta) -> None:
        """What follows is no longer the choice's first event."""
        self._first(choice.index)
        self._style.replayed(choice.index, text, delta.tokens, self._submission)

    def end(self, generation: Generation) -> bytes:
        """The end of the stream: a chunk with the usage, if asked for, and [DONE]."""
        if not self._style.shown.usage:
            return DONE
        return self._head + b',"choices":[],"usage":' + encode_event(usage(generation)) + b"}\n\n" + DONE

    def _first(self, index: int) -> bytes:
        start = self._head + b',"choices":[{"index":' + str(index).encode()
        self._before[index] = start + self._style.before
        return start + self._style.before_first

    def _rest(self, choice: ChoiceCounts, delta: OutputDelta, is_first: bool) -> bytes:
        """What follows the text of an event."""
        style, index = self._style, choice.index
        told = None
        if delta.logprobs is not None and style.shown.logprobs:
            told = style.logprobs(index, delta.tokens, delta.logprobs, self._submission)
        finish = style.finish(index, delta.finish)
        rest = style.after + encode_event(told) + b',"finish_reason":' + encode_event(finish)
        if self._is_plain:
            return rest + self._end
        inside = style.token_ids(delta.tokens)
        outside: dict[str, Any] = {}
        if is_first:
            inside |= style.prompt_ids(index, self._submission)
            outside |= style.beside_choices(self._submission, None)
        if style.shown.usage:
            outside["usage"] = self._usage_so_far(choice) if style.shown.running_usage else None
        return rest + _further(inside) + b"}]" + _further(outside) + b"}\n\n"

    def _usage_so_far(self, choice: ChoiceCounts) -> dict[str, Any]:
        prompt = self._submission.prompts[choice.index // self._submission.n]
        return _usage(len(prompt), choice.output_tokens, choice.cached_tokens)


def _further(fields: dict[str, Any]) -> bytes:
    """Fields that follow others of a JSON object."""
    return b"," + encode_event(fields)[1:-1] if fields else b""
