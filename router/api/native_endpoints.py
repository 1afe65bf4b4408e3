"""/generate (the native form, close to SGLang's), /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace
from pydantic import BaseModel, ConfigDict, Field

from common.errors import InvalidRequest
from router.api.answering import (
    encode_prompts,
    generating,
    is_batch,
    make_submission,
    stream,
)
from router.api.asgi import JSON, HttpRequest
from router.api.chat_fields import ChatFields, Messages
from router.api.collection import Collection
from router.api.native_answers import NativeEvents, OutputLogprobs, answer_of
from router.api.request_body import (
    Label,
    OutputLength,
    RequestBody,
    SamplingBody,
    Text,
    Texts,
    TokenId,
    TokenLists,
    Tokens,
    parse,
)
from router.api.tool_fields import Tools
from router.service import Router
from router.streams.generation import Submission
from wire.request import OutputDelta
from wire.sampling_ranges import MOST_LOGPROB_TOKENS, MOST_TOP_LOGPROBS


class NativeSampling(SamplingBody):
    """`sampling_params` of /generate."""

    max_new_tokens: OutputLength = 128
    min_new_tokens: int = Field(0, ge=0, description="min_tokens, as SGLang calls it")


class GenerateBody(RequestBody):
    """POST /generate. Either `text` or `input_ids`; a list of either is a batch."""

    model: Label | None = None
    text: Text | Texts | None = None
    input_ids: Tokens | TokenLists | None = None
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    return_logprob: bool = False
    top_logprobs_num: int = Field(0, ge=0, le=MOST_TOP_LOGPROBS)
    token_ids_logprob: list[TokenId] = Field(
        default_factory=list, max_length=MOST_LOGPROB_TOKENS, fail_fast=True,
        description="with return_logprob: tokens whose log-probabilities are told for each output token, too",
    )  # fmt: skip
    logprob_start_len: int = Field(
        -1, ge=-1, lt=2**31,
        description="with return_logprob: those of the prompt's tokens from this one on, too; -1: none",
    )  # fmt: skip


class TokenizeBody(ChatFields):
    """POST /tokenize: a text, or a chat."""

    model_config = ConfigDict(extra="forbid")

    model: Label | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = Field(False, description="the tokens as the vocabulary has them, too")


class DetokenizeBody(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(extra="forbid")

    model: Label | None = None
    tokens: Tokens
    skip_special_tokens: bool = False


async def generate(router: Router, request: HttpRequest) -> None:
    """POST /generate."""
    body = parse(GenerateBody, await request.json())
    params = parse(NativeSampling, body.sampling_params)
    if params.min_new_tokens:
        params = params.model_copy(update={"min_tokens": params.min_new_tokens})
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("give either text or input_ids", "text")
    param, given = ("text", body.text) if body.text is not None else ("input_ids", body.input_ids)
    model = router.model(body.model)
    grammar = await router.grammars.checked(params.wanted_grammar(model.formats.markers))
    prompts = await encode_prompts(model, given, param, params.n, add_special_tokens=True)
    for prompt in prompts:
        model.room_for(prompt, params.max_new_tokens, param)
    top = body.top_logprobs_num if body.return_logprob else None
    sampling = params.sampling(params.max_new_tokens, top, model, grammar)
    if body.token_ids_logprob:
        if not body.return_logprob:
            raise InvalidRequest("token_ids_logprob needs return_logprob=true", "token_ids_logprob")
        sampling = replace(sampling, logprob_token_ids=tuple(body.token_ids_logprob))
    if body.logprob_start_len >= 0:
        sampling = replace(sampling, prompt_logprobs=top)
    if body.stream and sampling.prompt_logprobs is not None:
        raise InvalidRequest("a prompt's log-probabilities are not streamed", "logprob_start_len")
    submission = await make_submission(router, model, request, body, params, prompts, sampling)
    if body.stream:
        await stream(router, request, submission, "generate", NativeEvents, repeats=True)
    else:
        as_list = params.n > 1 or is_batch(given)
        await _whole(router, request, submission, body.logprob_start_len, as_list)


async def _whole(
    router: Router, request: HttpRequest, submission: Submission, scored_from: int, as_list: bool
) -> None:
    collection = Collection(submission.choice_count)
    with generating(router, request, submission, router.assign(submission), collection) as generation:
        while await generation.more():
            pass
        if generation.abandoned:
            return

        def write() -> bytes:
            answers = []
            for counts, collected in zip(generation.choices, collection.choices, strict=True):
                logprobs = OutputLogprobs(submission.sampling)
                logprobs.add(OutputDelta(collected.tokens, collected.logprobs or None))
                answer = answer_of(submission, counts, collected, logprobs, scored_from)
                answers.append(msgspec.Raw(msgspec.json.encode(answer)))
            return msgspec.json.encode(answers if as_list else answers[0])

        await request.respond(200, await router.large_answers.written(collection.logprobs(), write), [JSON])


async def health_generate(router: Router, request: HttpRequest) -> None:
    """GET /health_generate: 200 when a worker has computed a token of the only model, or of the first."""
    model = next(iter(router.models.values()))
    prompt = [0]
    body = GenerateBody(input_ids=prompt)
    params = NativeSampling(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    sampling = params.sampling(1, None, model, None)
    submission = await make_submission(router, model, request, body, params, [prompt], sampling)
    with generating(router, request, submission, router.assign(submission), Collection(1)) as generation:
        while await generation.more():
            pass
    await request.respond_json({"status": "ok"})


async def get_model_info(router: Router, request: HttpRequest) -> None:
    """GET /get_model_info, as SGLang's: of the only model, or of the first. No path on this host is told."""
    model = next(iter(router.models.values()))
    await request.respond_json(
        {
            "model_path": model.name,
            "tokenizer_path": model.name,
            "is_generation": True,
            "max_model_len": model.versions.context_limit,
        }
    )


async def tokenize(router: Router, request: HttpRequest) -> None:
    """POST /tokenize."""
    body = parse(TokenizeBody, await request.json())
    model = router.model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", "prompt")
    if body.prompt is not None:
        tokens = await model.encode(body.prompt, body.add_special_tokens, "prompt", any_length=True)
    else:
        tokens = await model.encode_chat(body.make_chat(body.messages or [], body.tools), any_length=True)
    answer: dict[str, Any] = {
        "tokens": tokens, "count": len(tokens), "max_model_len": model.versions.context_limit,
    }  # fmt: skip
    if body.return_token_strs:
        answer["token_strs"] = await model.vocabulary_texts(tokens)
    await request.respond_json(answer)


async def detokenize(router: Router, request: HttpRequest) -> None:
    """POST /detokenize."""
    body = parse(DetokenizeBody, await request.json())
    model = router.model(body.model)
    await request.respond_json({"prompt": model.tokenization.decode(body.tokens, body.skip_special_tokens)})
