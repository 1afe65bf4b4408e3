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


class Style:
    """What differs between chat and completions: object names and the inside of a choice."""

    object_name: str
    chunk_name: str
    id_prefix: str
    before_first: bytes  # between `"index":N` and the text of a choice's first chunk
    before: bytes  # and of those that follow
    after: bytes  # between the text and the value of "logprobs"

    def __init__(self, detokenizers: DetokenizerFactory, shown: Shown) -> None:
        self._names = TokenNames(detokenizers, shown.ids_as_names, shown.named_tokens)
        self.shown = shown

    def choice(
        self, counts: ChoiceCounts, collected: CollectedChoice, submission: Submission
    ) -> dict[str, Any]:
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
        counts: ChoiceCounts,
        text: str,
        delta: OutputDelta,  # noqa: ARG002
        is_first: bool,
        submission: Submission,
    ) -> str | dict[str, Any]:
        """What a chunk says of a delta and its text."""
        return self.opening(counts.index, submission) + text if is_first else text

    def finish(self, index: int, finish: FinishReason | None) -> str | None:  # noqa: ARG002
        """Why a choice has ended, as a chunk says it."""
        return finish

    def opening(self, index: int, submission: Submission) -> str:  # noqa: ARG002
        """What the text of a choice begins with, before its output."""
        return ""

    def usage(self, prompt: int, completion: int, cached: int, reasoning: int) -> dict[str, Any]:  # noqa: ARG002
        """OpenAI's usage object, of so many tokens."""
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def whole_usage(self, generation: Generation) -> dict[str, Any]:
        """That of a whole answer."""
        return self.usage(
            generation.prompt_tokens(),
            generation.output_tokens(),
            generation.cached_tokens(),
            sum(choice.reasoning_tokens for choice in generation.choices),
        )

    def token_ids(self, tokens: list[int]) -> dict[str, Any]:
        """The ids of an output, if they were asked for."""
        return {"token_ids": tokens} if self.shown.token_ids else {}

    def logprobs(
        self, index: int, tokens: list[int], logprobs: list[TokenLogprobs], submission: Submission
    ) -> Any:
        """The log-probabilities of a chunk."""
        raise NotImplementedError

    def replayed(self, counts: ChoiceCounts, text: str, delta: OutputDelta, submission: Submission) -> None:
        """The client has this delta, and its text, already."""


def _stop_reason(matched: str | int | None, submission: Submission) -> str | int | None:
    """The stop string of the request that ended a choice, or the token among its stop_token_ids; None for the
    model's own end, and where there was no room for more. It is vLLM's."""
    return matched if isinstance(matched, str) or matched in submission.sampling.stop_token_ids else None


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

    def choice(
        self, counts: ChoiceCounts, collected: CollectedChoice, submission: Submission
    ) -> dict[str, Any]:
        logprobs = None
        if self.shown.logprobs:
            logprobs = chat_logprobs(self._names, collected.tokens, collected.logprobs)
        return {
            "index": counts.index,
            "message": {"role": "assistant", "content": collected.text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": collected.finish,
            "stop_reason": _stop_reason(collected.matched, submission),
            **self.token_ids(collected.tokens),
        }

    def usage(self, prompt: int, completion: int, cached: int, reasoning: int) -> dict[str, Any]:
        told = super().usage(prompt, completion, cached, reasoning)
        return {**told, "completion_tokens_details": {"reasoning_tokens": reasoning}}

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

    def choice(
        self, counts: ChoiceCounts, collected: CollectedChoice, submission: Submission
    ) -> dict[str, Any]:
        index = counts.index
        prompt = submission.prompts[index // submission.n]
        tokens = collected.tokens if self._outputs else []
        told: dict[str, Any] = {
            "index": index,
            "text": self.opening(index, submission) + (collected.text if self._outputs else ""),
            "logprobs": self._all_logprobs(submission, prompt, tokens, collected)
            if self.shown.logprobs
            else None,
            "finish_reason": collected.finish if self._outputs else FinishReason.LENGTH,
            "stop_reason": _stop_reason(collected.matched, submission) if self._outputs else None,
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

    def usage(self, prompt: int, completion: int, cached: int, reasoning: int) -> dict[str, Any]:
        return super().usage(prompt, completion if self._outputs else 0, cached, reasoning)

    def prompt_ids(self, index: int, submission: Submission) -> dict[str, Any]:
        prompt = submission.prompts[index // submission.n]
        return {"prompt_token_ids": prompt} if self.shown.token_ids else {}

    def beside_choices(self, submission: Submission, scores: list[TokenLogprobs] | None) -> dict[str, Any]:  # noqa: ARG002
        return {}

    def logprobs(
        self, index: int, tokens: list[int], logprobs: list[TokenLogprobs], submission: Submission
    ) -> Any:
        return completion_logprobs(self._names, tokens, logprobs, self._streamed(index, submission))

    def replayed(
        self,
        counts: ChoiceCounts,
        text: str,  # noqa: ARG002
        delta: OutputDelta,
        submission: Submission,
    ) -> None:
        self._streamed(counts.index, submission).of(delta.tokens)

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
        before = self._before.get(choice.index)
        is_first = before is None
        if before is None:
            before = self._first(choice.index)
        told = self._style.told(choice, text, delta, is_first, self._submission)
        event_id = self._ids.after(choice, delta.finish is not None)
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
        self._style.replayed(choice, text, delta, self._submission)

    def end(self, generation: Generation) -> bytes:
        """The end of the stream: a chunk with the usage, if asked for, and [DONE]."""
        if not self._style.shown.usage:
            return DONE
        told = encode_event(self._style.whole_usage(generation))
        return self._head + b',"choices":[],"usage":' + told + b"}\n\n" + DONE

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
        if delta.finish is not None:
            rest += b',"stop_reason":' + encode_event(_stop_reason(delta.matched, self._submission))
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
        return self._style.usage(
            len(prompt), choice.output_tokens, choice.cached_tokens, choice.reasoning_tokens
        )


def _further(fields: dict[str, Any]) -> bytes:
    """Fields that follow others of a JSON object."""
    return b"," + encode_event(fields)[1:-1] if fields else b""
