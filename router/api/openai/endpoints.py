"""/v1/chat/completions, /v1/completions, /v1/models."""

from __future__ import annotations

import time
from typing import Any

from router.api.answering import encode_chat, encode_prompts, generating, make_submission, stream
from router.api.asgi import HttpRequest
from router.api.collection import Collection
from router.api.event_ids import EventIds
from router.api.openai.answers import ChatStyle, CompletionStyle, SseWriter, Style, usage
from router.api.openai.schema import ChatBody, CompletionBody, OpenAIBody
from router.api.request_body import parse
from router.service import Router
from router.streams.generation import Submission


async def chat_completions(router: Router, request: HttpRequest) -> None:
    """POST /v1/chat/completions."""
    body = parse(ChatBody, await request.json())
    router.check_model(body.model)
    prompt = await encode_chat(router, body.make_chat(body.messages, body.tool_choice != "none"))
    length = router.room_for(prompt, body.wanted, "messages")
    top = (body.top_logprobs or 0) if body.logprobs else None
    sampling = body.sampling(length, top, router.tokenization.vocab_size)
    style = ChatStyle(router.tokenization.detokenizers, body.logprobs)
    submission = make_submission(
        router, request, body, body, [prompt], sampling, body.prompt_cache_key, body.wanted is not None
    )
    await _answer(router, request, body, submission, style)


async def completions(router: Router, request: HttpRequest) -> None:
    """POST /v1/completions."""
    body = parse(CompletionBody, await request.json())
    router.check_model(body.model)
    prompts = await encode_prompts(router, body.prompt, "prompt", body.n, body.add_special_tokens)
    for prompt in prompts:
        router.room_for(prompt, body.max_tokens, "prompt")
    sampling = body.sampling(body.max_tokens, body.logprobs, router.tokenization.vocab_size)
    style = CompletionStyle(router.tokenization.detokenizers, body.logprobs is not None)
    submission = make_submission(router, request, body, body, prompts, sampling, body.prompt_cache_key)
    await _answer(router, request, body, submission, style)


async def models(router: Router, request: HttpRequest) -> None:
    """GET /v1/models."""
    name = router.options.served_model_name
    entry: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": router.started_at,
        "owned_by": "baton",
        "max_model_len": router.membership.context_limit,
    }
    await request.respond_json({"object": "list", "data": [entry]})


async def _answer(
    router: Router,
    request: HttpRequest,
    body: OpenAIBody,
    submission: Submission,
    style: Style,
) -> None:
    if not body.stream:
        await _whole(router, request, submission, style)
        return

    def writer(submission: Submission, ids: EventIds) -> SseWriter:
        model, created = router.options.served_model_name, int(time.time())
        return SseWriter(style, submission.request_id, created, model, body.include_usage, ids)

    form = f"{style.chunk_name}+usage" if body.include_usage else style.chunk_name
    await stream(router, request, submission, form, writer)


async def _whole(router: Router, request: HttpRequest, submission: Submission, style: Style) -> None:
    collection = Collection(submission.choice_count)
    with generating(router, request, submission, collection) as generation:
        while await generation.more():
            pass
        if generation.abandoned:
            return
        await request.respond_json(
            {
                "id": style.id_prefix + request.request_id,
                "object": style.object_name,
                "created": int(time.time()),
                "model": router.options.served_model_name,
                "choices": [style.choice(index, one) for index, one in enumerate(collection.choices)],
                "usage": usage(generation),
            }
        )
