"""/v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from router.api.answering import generating, make_submission, stream
from router.api.anthropic.answers import MessageEvents, whole_message
from router.api.anthropic.schema import CountTokensBody, MessagesBody
from router.api.asgi import HttpRequest
from router.api.collection import Collection
from router.api.request_body import parse
from router.service import Router
from router.streams.generation import Submission


async def messages(router: Router, request: HttpRequest) -> None:
    """POST /v1/messages."""
    body = parse(MessagesBody, await request.json())
    model = router.model(body.model)
    grammar = await router.grammars.checked(body.wanted_grammar())
    chat = body.make_chat()
    prompt = await model.encode_chat(chat)
    limit = model.versions.context_limit
    # Clients ask for the most that any model writes: the context may leave less, and the answer says so.
    wanted = body.max_tokens if limit is None else min(body.max_tokens, max(limit - len(prompt), 1))
    length = model.room_for(prompt, wanted, "messages")
    cut, params = length < body.max_tokens, body.sampling_fields()
    sampling = params.sampling(length, None, model, grammar)
    submission = make_submission(
        router, model, request, body, params, [prompt], sampling, "", not cut, chat.opening
    )
    if body.stream:
        await stream(router, request, submission, "message", lambda final, _: MessageEvents(final, cut))
    else:
        await _whole(router, request, submission, cut)


async def _whole(router: Router, request: HttpRequest, submission: Submission, cut: bool) -> None:
    collection = Collection(1)
    with generating(router, request, submission, router.assign(submission), collection) as generation:
        while await generation.more():
            pass
        if not generation.abandoned:
            (counts,), (collected,) = generation.choices, collection.choices
            await request.respond_json(whole_message(submission, counts, collected, cut))


async def count_tokens(router: Router, request: HttpRequest) -> None:
    """POST /v1/messages/count_tokens."""
    body = parse(CountTokensBody, await request.json())
    prompt = await router.model(body.model).encode_chat(body.make_chat(), any_length=True)
    await request.respond_json({"input_tokens": len(prompt)})
