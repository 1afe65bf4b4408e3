"""/v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from msgspec.structs import replace

from router.api.answer_parts import AnswerParts, UnstreamedDraft, grammar_and_parsing
from router.api.answering import generating, make_submission, stream
from router.api.anthropic.answers import MessageDraft, MessageEvents
from router.api.anthropic.schema import CountTokensBody, MessagesBody
from router.api.asgi import HttpRequest
from router.api.request_body import parse
from router.service import Router
from router.streams.generation import Submission


async def messages(router: Router, request: HttpRequest) -> None:
    """POST /v1/messages."""
    body = parse(MessagesBody, await request.json())
    model = router.model(body.model)
    chat = body.make_chat()
    prompt = await model.encode_chat(chat)
    limit = model.versions.context_limit
    # Clients ask for the most that any model writes: the context may leave less, and the answer says so.
    most = body.max_tokens if limit is None else min(body.max_tokens, max(limit - len(prompt), 1))
    length = model.room_for(prompt, most, "messages")
    tools, wanted = body.tool_fields(), body.wanted_grammar()
    grammar, parsing = await grammar_and_parsing(
        router, model, prompt, tools, wanted, continued=chat.continued
    )
    cut, params = length < body.max_tokens, body.sampling_fields()
    sampling = params.sampling(length, None, model, grammar)
    budget = None if body.thinking is None else body.thinking.budget
    if budget is not None and model.formats.thought_tags is not None:
        thoughts = model.thought_limit(prompt, budget, length, chat.continued)
        sampling = replace(sampling, thoughts=thoughts)
    submission = await make_submission(
        router, model, request, body, params, [prompt], sampling, "", not cut, chat.opening, parsing
    )

    def draft(final: Submission) -> MessageDraft:
        parts = AnswerParts(parsing, final.first_room, tools.parallel_tool_calls)
        return MessageDraft(final, parts, cut)

    if body.stream:
        await stream(router, request, submission, "message", lambda final, _: MessageEvents(draft(final)))
    else:
        await _whole(router, request, submission, draft(submission))


async def _whole(router: Router, request: HttpRequest, submission: Submission, draft: MessageDraft) -> None:
    answer, assignment = UnstreamedDraft(draft), router.assign(submission)
    with generating(router, request, submission, assignment, answer) as generation:
        while await generation.more():
            pass
        if not generation.abandoned:
            await request.respond_json(draft.whole())


async def count_tokens(router: Router, request: HttpRequest) -> None:
    """POST /v1/messages/count_tokens."""
    body = parse(CountTokensBody, await request.json())
    prompt = await router.model(body.model).encode_chat(body.make_chat(), any_length=True)
    await request.respond_json({"input_tokens": len(prompt)})
