"""/v1/chat/completions, /v1/completions, /v1/models."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from msgspec.structs import replace

from router.api.answering import encode_prompts, generating, is_batch, make_submission, stream
from router.api.asgi import JSON, HttpRequest
from router.api.collection import Collection
from router.api.event_ids import EventIds
from router.api.openai.answers import ChatStyle, CompletionStyle, SseWriter, Style
from router.api.openai.chat_parts import PartsStyle
from router.api.openai.schema import ChatBody, CompletionBody, OpenAIBody
from router.api.request_body import parse
from router.api.tool_fields import tool_schemas
from router.model import Model
from router.service import Router
from router.streams.generation import Submission

MODEL_PATH = "/v1/models/"


async def chat_completions(router: Router, request: HttpRequest) -> None:
    """POST /v1/chat/completions."""
    body = parse(ChatBody, await request.json())
    model = router.model(body.model)
    wanted, tools = body.wanted_grammar(model.formats.markers), body.callable_tools()
    chat = body.make_chat(body.messages, tools)
    prompt = await model.encode_chat(chat, body.is_cut)
    prompt = body.cut(prompt, model.versions.context_limit, body.wanted or 1)
    length = model.room_for(prompt, body.wanted, "messages")
    top = body.best_told((body.top_logprobs or 0) if body.logprobs else None)
    calls = body.calls_wanted(tools, wanted)
    grammar = await router.grammars.checked(model.wanted_around(prompt, wanted, calls, chat.continued))
    sampling = body.sampling(length, top, model, grammar)
    thoughts = None
    if (budget := body.thinking_token_budget) is not None and budget >= 0:
        thoughts = model.thought_limit(prompt, budget, length, chat.continued)
    sampling = replace(
        sampling, prompt_logprobs=body.prompt_logprobs, thoughts=thoughts,
        logprob_token_ids=tuple(body.logprob_token_ids),
    )  # fmt: skip
    schemas = None if tools is None else tool_schemas(tools)
    parsing = model.parsing(
        prompt, schemas, body.separate_reasoning, not body.skip_special_tokens, body.are_required,
        chat.continued,
    )  # fmt: skip
    style = ChatStyle(model.tokenization.detokenizers, body.shown(body.logprobs))
    if parsing is not None:
        style = PartsStyle(model.tokenization.detokenizers, style.shown, parsing, body.parts_wanted())
    submission = await make_submission(
        router, model, request, body, body, [prompt], sampling, body.session,
        body.wanted is not None, chat.opening, parsing,
    )  # fmt: skip
    await _answer(router, request, body, submission, style)


async def completions(router: Router, request: HttpRequest) -> None:
    """POST /v1/completions."""
    body = parse(CompletionBody, await request.json())
    model = router.model(body.model)
    grammar = await router.grammars.checked(body.wanted_grammar(model.formats.markers))
    asked = body.asked(model)
    prompts = await encode_prompts(model, asked, "prompt", body.n, body.add_special_tokens, body.is_cut)
    length = body.max_tokens or 1  # workers compute one at least
    prompts = [body.cut(prompt, model.versions.context_limit, length) for prompt in prompts]
    for prompt in prompts:
        model.room_for(prompt, length, "prompt")
    sampling = body.sampling(length, body.best_told(body.logprobs), model, grammar)
    named = tuple(body.logprob_token_ids)
    sampling = replace(sampling, prompt_logprobs=body.scored, logprob_token_ids=named)
    echoed = _texts(model, body, prompts) if body.echo else None
    shown = body.shown(body.logprobs is not None)
    style = CompletionStyle(model.tokenization.detokenizers, shown, echoed, body.max_tokens > 0)
    submission = await make_submission(router, model, request, body, body, prompts, sampling, body.session)
    await _answer(router, request, body, submission, style)


def _texts(model: Model, body: CompletionBody, prompts: list[list[int]]) -> list[str]:
    """The prompts as they were written, or else what their tokens say."""
    given = body.prompt if is_batch(body.prompt) else [body.prompt]
    decode = model.tokenization.decode
    return [
        text if isinstance(text, str) and not body.is_cut else decode(prompt, body.skip_special_tokens)
        for text, prompt in zip(given, prompts, strict=True)
    ]


async def models(router: Router, request: HttpRequest) -> None:
    """GET /v1/models."""
    entries = [_entry(router, model) for model in router.models.values()]
    await request.respond_json({"object": "list", "data": entries})


async def model(router: Router, request: HttpRequest) -> None:
    """GET /v1/models/{model}."""
    await request.respond_json(_entry(router, router.model(request.path.removeprefix(MODEL_PATH))))


def _entry(router: Router, model: Model) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": router.started_at,
        "owned_by": "baton",
        "max_model_len": model.versions.context_limit,
    }


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
        created = int(time.time())
        return SseWriter(style, submission, created, ids)

    await stream(router, request, submission, style.form, writer)


async def _whole(router: Router, request: HttpRequest, submission: Submission, style: Style) -> None:
    collection = Collection(submission.choice_count)
    with generating(router, request, submission, router.assign(submission), collection) as generation:
        while await generation.more():
            pass
        if generation.abandoned:
            return

        def write() -> bytes:
            told = (
                style.choice(counts, one, submission)
                for counts, one in zip(generation.choices, collection.choices, strict=True)
            )
            # In parts: nothing else runs while one is encoded.
            choices = [msgspec.Raw(msgspec.json.encode(choice)) for choice in told]
            return msgspec.json.encode(
                {
                    "id": style.id_prefix + request.request_id,
                    "object": style.object_name,
                    "created": int(time.time()),
                    "model": submission.model,
                    "choices": choices,
                    "usage": style.whole_usage(generation),
                    **style.beside_choices(submission, collection.choices[0].prompt_logprobs),
                }
            )

        await request.respond(200, await router.large_answers.written(collection.logprobs(), write), [JSON])
