"""From a parsed request to its answer: what the OpenAI API and /generate have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec

from common.errors import BatonError, InvalidRequest
from router.api.asgi import HttpRequest
from router.api.http_errors import to_http
from router.api.request_body import RequestBody, SamplingBody
from router.service import Router
from router.streams.generation import Answer, Generation, Submission
from wire.request import SamplingParams

DONE = b"data: [DONE]\n\n"
# Longer texts are tokenised on another thread (the tokenizer releases the GIL), so that other streams go on.
_LONG_TEXT = 16_384


class StreamedAnswer(Answer, Protocol):
    """An answer whose events are sent while it grows."""

    def take(self) -> bytes:
        """The events that have not been taken yet."""

    def end(self, generation: Generation) -> bytes:
        """The events that follow the last token."""


async def encode(router: Router, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids of a text."""
    if len(text) > _LONG_TEXT:
        return await asyncio.to_thread(router.tokenization.encode, text, add_special_tokens)
    return router.tokenization.encode(text, add_special_tokens)


def is_batch(given: Any) -> bool:
    """Whether several prompts were given: a list of texts or of lists of token ids."""
    return not (isinstance(given, str) or (given and isinstance(given[0], int)))


async def encode_prompts(router: Router, given: Any, param: str, add_special_tokens: bool) -> list[list[int]]:
    """Token ids of each prompt, or of the only one. Raises InvalidRequest for ids outside the vocabulary."""
    prompts: list[list[int]] = []
    for prompt in given if is_batch(given) else [given]:
        if isinstance(prompt, str):
            prompts.append(await encode(router, prompt, add_special_tokens))
        else:
            prompts.append(_known_tokens(router, prompt, param))
    return prompts


def _known_tokens(router: Router, tokens: list[int], param: str) -> list[int]:
    if tokens and max(tokens) >= router.tokenization.vocab_size:
        raise InvalidRequest(
            f"token {max(tokens)} is not in the vocabulary of {router.tokenization.vocab_size}", param
        )
    return tokens


def make_submission(
    request: HttpRequest,
    body: RequestBody,
    params: SamplingBody,
    prompts: list[list[int]],
    sampling: SamplingParams,
    session: str,
) -> Submission:
    """What the router is asked to do. Headers win over the body."""
    return Submission(
        request_id=request.request_id,
        prompts=prompts,
        sampling=sampling,
        n=params.n,
        stop=params.stops(),
        skip_special_tokens=params.skip_special_tokens,
        extra_key=body.extra_key,
        cache_salt=body.cache_salt,
        tenant=request.header(b"x-baton-tenant") or body.user,
        priority=body.priority,
        session=request.header(b"x-baton-session") or session,
        arrived_ns=request.arrived_ns,
    )


@contextmanager
def generating(
    router: Router, request: HttpRequest, submission: Submission, answer: Answer
) -> Iterator[Generation]:
    """Submit, and stop what still runs when the block ends or the client goes."""
    generation = router.submit(submission, answer)
    watch = request.watch(generation)
    try:
        yield generation
    finally:
        watch.cancel()
        generation.close()


async def stream(
    router: Router, request: HttpRequest, submission: Submission, answer: StreamedAnswer
) -> None:
    """Serve a request as events.

    The head goes out with the first token, so that what fails before has an HTTP status of its own.
    """
    with generating(router, request, submission, answer) as generation:
        await generation.more()
        if generation.abandoned:
            return
        await request.begin_sse()
        try:
            last = await _send_events(request, generation, answer)
        except BatonError as error:
            last = b"data: " + msgspec.json.encode(to_http(error).body) + b"\n\n"
        if not generation.abandoned:
            await request.send_sse(last + answer.end(generation), more=False)


async def _send_events(request: HttpRequest, generation: Generation, answer: StreamedAnswer) -> bytes:
    """Send events until none follow. Returns the last, not sent: what ends the stream goes with them.

    Raises the BatonError that ended the request.
    """
    while True:
        events = answer.take()
        if generation.complete:
            return events
        await request.send_sse(events)
        if not await generation.more():
            return b""
