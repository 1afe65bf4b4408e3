"""/generate (the native form, close to SGLang's), /tokenize and /detokenize."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from common.errors import BatonError, InvalidRequest
from router.api.asgi import HttpRequest
from router.api.http_errors import to_http
from router.api.openai.answers import DONE, Collected, Collection, collect
from router.api.openai.endpoints import as_batch, encode, known_tokens, stream_events
from router.api.openai.schema import SamplingBody, TokenId, parse
from router.service import Router
from router.streams.generation import Generation, Submission
from wire.messages import FinishReason, TokenLogprobs
from wire.stages import RequestStage, Stamp


class NativeSampling(SamplingBody):
    """`sampling_params` of /generate."""

    max_new_tokens: int = Field(128, ge=1)
    min_new_tokens: int = Field(0, ge=0)


class GenerateBody(BaseModel):
    """POST /generate. Either `text` or `input_ids`; a list of either is a batch."""

    model_config = ConfigDict(extra="forbid")

    text: str | list[str] | None = None
    input_ids: list[TokenId] | list[list[TokenId]] | None = None
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    stream: bool = False
    return_logprob: bool = False
    top_logprobs_num: int = Field(0, ge=0, le=20)
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: str = ""
    extra_key: str = ""
    user: str = ""


class TokenizeBody(BaseModel):
    """POST /tokenize: a text, or a chat."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class DetokenizeBody(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool = False


async def generate(router: Router, request: HttpRequest) -> None:
    """POST /generate."""
    arrived_ns = time.time_ns()
    body = parse(GenerateBody, await request.json())
    params = parse(NativeSampling, body.sampling_params)
    if params.min_new_tokens:
        params = params.model_copy(update={"min_tokens": params.min_new_tokens})
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("give either text or input_ids", "text")
    param, given = ("text", body.text) if body.text is not None else ("input_ids", body.input_ids)
    prompts = [
        await encode(router, prompt, add_special_tokens=True)
        if isinstance(prompt, str)
        else known_tokens(router, prompt, param)
        for prompt in as_batch(given)
    ]
    if not prompts:
        raise InvalidRequest("the batch is empty", param)
    for prompt in prompts:
        router.room_for(prompt, params.max_new_tokens, param)
    top = body.top_logprobs_num if body.return_logprob else None
    generation = router.submit(
        Submission(
            request_id=request.request_id,
            prompts=prompts,
            sampling=params.sampling(params.max_new_tokens, top, router.tokenization.vocab_size),
            n=params.n,
            stop=params.stops(),
            skip_special_tokens=params.skip_special_tokens,
            extra_key=body.extra_key,
            cache_salt=body.cache_salt,
            tenant=request.header(b"x-baton-tenant") or body.user,
            priority=body.priority,
            session=request.header(b"x-baton-session") or "",
            arrived_ns=arrived_ns,
        ),
        [Stamp(RequestStage.TOKENIZE, arrived_ns)],
    )
    batch = params.n > 1 or not (isinstance(given, str) or (given and isinstance(given[0], int)))
    watch = request.watch(generation)
    try:
        if body.stream:
            await _stream(request, generation)
        else:
            collected = await collect(generation)
            if not generation.abandoned():
                answers = [_answer(generation, i, choice) for i, choice in enumerate(collected)]
                await request.respond_json(answers if batch else answers[0])
    finally:
        watch.cancel()
        generation.close()


class _Events:
    """Each event repeats the whole text so far, as SGLang's do; in a batch they say whose by `index`."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._collection = Collection(len(generation.outputs))
        self._events: list[bytes] = []
        self.unread = 0

    def add(
        self,
        index: int,
        text: str,
        tokens: list[int],
        logprobs: list[TokenLogprobs] | None,
        finish: FinishReason | None,
        matched: str | int | None,
    ) -> None:
        """See Answer."""
        self._collection.add(index, text, tokens, logprobs, finish, matched)
        answer = {**_answer(self._generation, index, self._collection.choices[index]), "index": index}
        event = b"data: " + msgspec.json.encode(answer) + b"\n\n"
        self._events.append(event)
        self.unread += len(event)

    def take(self) -> bytes:
        """The events that have not been taken yet."""
        events, self._events = self._events, []
        self.unread = 0
        return b"".join(events)


async def _stream(request: HttpRequest, generation: Generation) -> None:
    events = generation.answer = _Events(generation)
    await generation.more()
    if generation.abandoned():
        return
    await request.begin_sse()
    try:
        last = await stream_events(request, generation, events)
    except BatonError as error:
        last = b"data: " + msgspec.json.encode(to_http(error).body) + b"\n\n"
    if not generation.abandoned():
        await request.send_sse(last + DONE, more=False)


def _answer(generation: Generation, index: int, choice: Collected) -> dict[str, Any]:
    output, submission = generation.outputs[index], generation.submission
    assert output.room is not None
    meta: dict[str, Any] = {
        "id": submission.request_id,
        "finish_reason": _finish(choice),
        "prompt_tokens": len(submission.prompts[index // submission.n]),
        "completion_tokens": len(choice.tokens),
        "cached_tokens": output.room.cached_tokens,
        "e2e_latency": (time.time_ns() - submission.arrived_ns) / 1e9,
    }
    if submission.sampling.top_logprobs is not None:
        pairs = list(zip(choice.tokens, choice.logprobs, strict=True))
        meta["output_token_logprobs"] = [[entry.logprob, token, None] for token, entry in pairs]
        meta["output_top_logprobs"] = [[[lp, token, None] for token, lp in entry.top] for _, entry in pairs]
    return {"text": choice.text, "output_ids": choice.tokens, "meta_info": meta}


def _finish(choice: Collected) -> dict[str, Any] | None:
    if choice.finish is None:
        return None
    if choice.finish is FinishReason.LENGTH:
        return {"type": "length", "length": len(choice.tokens)}
    return {"type": "stop", "matched": choice.matched}


async def tokenize(router: Router, request: HttpRequest) -> None:
    """POST /tokenize."""
    body = parse(TokenizeBody, await request.json())
    router.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", "prompt")
    if body.prompt is not None:
        tokens = await encode(router, body.prompt, body.add_special_tokens)
    else:
        text = router.tokenization.render_chat(
            body.messages or [], body.tools, body.add_generation_prompt, body.chat_template_kwargs
        )
        tokens = await encode(router, text, add_special_tokens=False)
    await request.respond_json(
        {"tokens": tokens, "count": len(tokens), "max_model_len": router.context_limit}
    )


async def detokenize(router: Router, request: HttpRequest) -> None:
    """POST /detokenize."""
    body = parse(DetokenizeBody, await request.json())
    router.check_model(body.model)
    await request.respond_json({"prompt": router.tokenization.decode(body.tokens, body.skip_special_tokens)})
