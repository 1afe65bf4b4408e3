"""/v1/responses."""

from __future__ import annotations

from functools import partial

from router.api.answer_parts import AnswerParts, UnstreamedDraft, grammar_and_parsing
from router.api.answering import generating, make_submission, stream, tenant_of
from router.api.asgi import HttpRequest
from router.api.openai.logprobs import TokenNames
from router.api.openai.responses.answers import ResponseDraft, ResponseEvents
from router.api.openai.responses.output import new_response_id
from router.api.openai.responses.schema import ResponseBody
from router.api.openai.responses.turns import Messages, find_turn, keep_turn, with_items
from router.api.request_body import parse
from router.kept_responses import ResponseKey
from router.service import Router
from router.streams.generation import Submission

RESPONSE_PATH = "/v1/responses/"


async def create(router: Router, request: HttpRequest) -> None:
    """POST /v1/responses."""
    body = parse(ResponseBody, await request.json())
    model = router.model(body.model)
    tenant = tenant_of(router, request)
    before: Messages = []
    if body.previous_response_id is not None:
        key = ResponseKey(tenant, body.previous_response_id)
        before = (await find_turn(router, key, "previous_response_id")).messages
    items = await with_items(router, tenant, body.items)
    chat = body.make_chat(before, items)
    prompt = await model.encode_chat(chat)
    length = model.room_for(prompt, body.max_output_tokens, "input")
    wanted = body.wanted_grammar(model.formats.markers)
    grammar, parsing = await grammar_and_parsing(
        router, model, prompt, body.tool_fields(), wanted, not body.skip_special_tokens, chat.continued
    )
    sampling = body.sampling(length, body.scored, model, grammar)
    submission = await make_submission(
        router, model, request, body, body, [prompt], sampling, body.prompt_cache_key,
        body.max_output_tokens is not None, chat.opening, parsing,
    )  # fmt: skip
    response_id = new_response_id()
    key = ResponseKey(tenant, response_id)
    keep = partial(keep_turn, router, key, before, items) if body.store else _keep_nothing

    def draft(final: Submission) -> ResponseDraft:
        parts = AnswerParts(parsing, final.first_room, body.parallel_tool_calls)
        names = TokenNames(model.tokenization.detokenizers, False)
        return ResponseDraft(response_id, body, final, parts, names)

    if body.stream:
        await stream(
            router, request, submission, "response",
            lambda final, _: ResponseEvents(draft(final), keep),
        )  # fmt: skip
        return
    filled = draft(submission)
    if await _fill(router, request, submission, filled):
        response = filled.whole()
        keep(response, filled.output)
        await request.respond_json(response)


def _keep_nothing(*_: object) -> None:
    """The client does not want it."""


async def _fill(router: Router, request: HttpRequest, submission: Submission, draft: ResponseDraft) -> bool:
    """Returns False when the client has left."""
    answer, assignment = UnstreamedDraft(draft), router.assign(submission)
    with generating(router, request, submission, assignment, answer) as generation:
        while await generation.more():
            pass
        return not generation.abandoned


async def retrieve(router: Router, request: HttpRequest) -> None:
    """GET /v1/responses/{id}."""
    turn = await find_turn(router, _key(router, request), None)
    await request.respond_json(turn.response)


async def delete(router: Router, request: HttpRequest) -> None:
    """DELETE /v1/responses/{id}."""
    key = _key(router, request)
    await find_turn(router, key, None)
    router.responses.drop(key)
    await request.respond_json({"id": key.id, "object": "response", "deleted": True})


def _key(router: Router, request: HttpRequest) -> ResponseKey:
    return ResponseKey(tenant_of(router, request), request.path.removeprefix(RESPONSE_PATH))
