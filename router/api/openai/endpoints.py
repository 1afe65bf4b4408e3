"""/v1/chat/completions, /v1/completions, /v1/models."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

import msgspec

from common.errors import BatonError, InvalidRequest
from router.api.asgi import HttpRequest
from router.api.http_errors import to_http
from router.api.openai.answers import DONE, ChatStyle, CompletionStyle, SseWriter, Style, collect, usage
from router.api.openai.schema import ChatBody, CompletionBody, OpenAIBody, parse
from router.service import Router
from router.streams.generation import Generation, Submission
from wire.messages import SamplingParams
from wire.stages import RequestStage, Stamp

# Longer texts are tokenised on another thread (the tokenizer releases the GIL), so that other streams go on.
_LONG_TEXT = 16_384
_MOST_PROMPTS = 256


async def chat_completions(router: Router, request: HttpRequest) -> None:
    """POST /v1/chat/completions."""
    arrived_ns = time.time_ns()
    body = parse(ChatBody, await request.json())
    router.check_model(body.model)
    stamps = [Stamp(RequestStage.TOKENIZE, arrived_ns)]
    text = router.tokenization.render_chat(
        body.plain_messages(),
        body.tools if body.tool_choice != "none" else None,
        body.add_generation_prompt,
        body.chat_template_kwargs,
    )
    prompt = await encode(router, text, add_special_tokens=False)
    length = router.room_for(prompt, body.wanted, "messages")
    top = (body.top_logprobs or 0) if body.logprobs else None
    sampling = body.sampling(length, top, router.tokenization.vocab_size)
    submission = _submission(request, body, [prompt], sampling, arrived_ns)
    style = ChatStyle(router.tokenization.detokenizers, body.logprobs)
    await _answer(router, request, body, submission, stamps, style)


async def completions(router: Router, request: HttpRequest) -> None:
    """POST /v1/completions."""
    arrived_ns = time.time_ns()
    body = parse(CompletionBody, await request.json())
    router.check_model(body.model)
    stamps = [Stamp(RequestStage.TOKENIZE, arrived_ns)]
    prompts = [
        await encode(router, prompt, body.add_special_tokens)
        if isinstance(prompt, str)
        else known_tokens(router, prompt, "prompt")
        for prompt in as_batch(body.prompt)
    ]
    if not 0 < len(prompts) <= _MOST_PROMPTS:
        raise InvalidRequest(f"between 1 and {_MOST_PROMPTS} prompts are needed", "prompt")
    for prompt in prompts:
        router.room_for(prompt, body.max_tokens, "prompt")
    sampling = body.sampling(body.max_tokens, body.logprobs, router.tokenization.vocab_size)
    submission = _submission(request, body, prompts, sampling, arrived_ns)
    style = CompletionStyle(router.tokenization.detokenizers, body.logprobs is not None)
    await _answer(router, request, body, submission, stamps, style)


async def models(router: Router, request: HttpRequest) -> None:
    """GET /v1/models."""
    name = router.options.served_model_name
    entry: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": router.started_at,
        "owned_by": "baton",
        "max_model_len": router.context_limit,
    }
    await request.respond_json({"object": "list", "data": [entry]})


def as_batch(prompt: Any) -> list[str | list[int]]:
    """One prompt or several, as text or token ids, as several."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


async def encode(router: Router, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids of a text."""
    if len(text) > _LONG_TEXT:
        return await asyncio.to_thread(router.tokenization.encode, text, add_special_tokens)
    return router.tokenization.encode(text, add_special_tokens)


def known_tokens(router: Router, tokens: list[int], param: str) -> list[int]:
    """The same tokens. Raises InvalidRequest for one outside the vocabulary."""
    if tokens and max(tokens) >= router.tokenization.vocab_size:
        raise InvalidRequest(
            f"token {max(tokens)} is not in the vocabulary of {router.tokenization.vocab_size}", param
        )
    return tokens


def _submission(
    request: HttpRequest,
    body: OpenAIBody,
    prompts: list[list[int]],
    sampling: SamplingParams,
    arrived_ns: int,
) -> Submission:
    return Submission(
        request_id=request.request_id,
        prompts=prompts,
        sampling=sampling,
        n=body.n,
        stop=body.stops(),
        skip_special_tokens=body.skip_special_tokens,
        extra_key=body.extra_key,
        cache_salt=body.cache_salt,
        tenant=request.header(b"x-baton-tenant") or body.user,
        priority=body.priority,
        session=request.header(b"x-baton-session") or body.prompt_cache_key,
        arrived_ns=arrived_ns,
    )


async def _answer(
    router: Router,
    request: HttpRequest,
    body: OpenAIBody,
    submission: Submission,
    stamps: list[Stamp],
    style: Style,
) -> None:
    generation = router.submit(submission, stamps)
    watch = request.watch(generation)
    try:
        if body.stream:
            await _stream(router, request, body, generation, style)
        else:
            await _whole(router, request, generation, style)
    finally:
        watch.cancel()
        generation.close()


async def _whole(router: Router, request: HttpRequest, generation: Generation, style: Style) -> None:
    collected = await collect(generation)
    if generation.abandoned():
        return
    await request.respond_json(
        {
            "id": style.id_prefix + request.request_id,
            "object": style.object_name,
            "created": int(time.time()),
            "model": router.options.served_model_name,
            "choices": [style.choice(index, choice) for index, choice in enumerate(collected)],
            "usage": usage(generation),
        }
    )


async def _stream(
    router: Router, request: HttpRequest, body: OpenAIBody, generation: Generation, style: Style
) -> None:
    """The head goes out with the first token, so that what fails before it is an honest status."""
    model, created = router.options.served_model_name, int(time.time())
    writer = SseWriter(style, request.request_id, created, model, body.include_usage)
    generation.answer = writer
    await generation.more()
    if generation.abandoned():
        return
    await request.begin_sse()
    try:
        events = await stream_events(request, generation, writer)
    except BatonError as error:
        events = b"data: " + msgspec.json.encode(to_http(error).body) + b"\n\n"
    if generation.abandoned():
        return
    last = writer.usage(generation) + DONE if body.include_usage else DONE
    await request.send_sse(events + last, more=False)


class Events(Protocol):
    """An answer that is streamed."""

    def take(self) -> bytes:
        """The events that have not been taken yet."""


async def stream_events(request: HttpRequest, generation: Generation, answer: Events) -> bytes:
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
