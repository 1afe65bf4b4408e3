"""GET /openapi.json: the API port as an OpenAPI 3.1 document, made from the models that parse the requests.

Not in a schema: limits that depend on the model (vocabulary, context) and rules between two fields. A request
that breaks one gets a 400, as any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from router.api.anthropic.schema import CountTokensBody, MessagesBody
from router.api.asgi import JSON, HttpRequest
from router.api.native_endpoints import DetokenizeBody, GenerateBody, NativeSampling, TokenizeBody
from router.api.openai.embeddings import EmbeddingBody
from router.api.openai.responses.schema import ResponseBody
from router.api.openai.schema import ChatBody, CompletionBody
from router.api.other_fields import OTHER_FIELDS
from router.api.request_body import RequestBody, SamplingBody
from router.service import Router

Schema = dict[str, Any]

_BODIES = (
    ChatBody, CompletionBody, ResponseBody, EmbeddingBody, MessagesBody, CountTokensBody, GenerateBody,
    NativeSampling, TokenizeBody, DetokenizeBody,
)  # fmt: skip
_REF = "#/components/schemas/{model}"
_ERRORS = {
    400: "the request is wrong: `param` names the field, if it is one",
    401: "the router has API keys, and none of them was shown",
    404: "the model is not served here, or nothing of that id is kept",
    405: "the path does not take this method",
    408: "the rest of the body did not come in time",
    410: "an operator has ended the request",
    413: "the body is too long",
    415: "the body is not JSON, or packed otherwise than with gzip",
    429: "too much waits already: try again after Retry-After seconds",
    500: "the model has no usable output for this request",
    503: "no worker can take the request now: try again after Retry-After seconds",
    504: "the request ran for as long as a request may",
}
_EVENT: Schema = {
    "type": "object",
    "description": "an event of a stream (stream=true): its fields. The last one's data is [DONE]",
    "properties": {"data": {"type": "string"}, "id": {"type": "string"}, "event": {"type": "string"}},
}


async def openapi(router: Router, request: HttpRequest) -> None:
    """GET /openapi.json."""
    await request.respond(200, _encoded(*router.models), [JSON])


@cache
def _encoded(*model_names: str) -> bytes:
    return msgspec.json.encode(document(*model_names))


def document(*model_names: str) -> Schema:
    """The document of a router that serves the models of these names."""
    streamed = {"text/event-stream": {"schema": _EVENT}}
    usage = _object(
        prompt_tokens=_INT, completion_tokens=_INT, total_tokens=_INT,
        prompt_tokens_details=_object(cached_tokens=_INT),
    )  # fmt: skip
    choices = _array(_object(index=_INT, finish_reason={"enum": ["stop", "length", "tool_calls"]}))
    answer = _object(id=_TEXT, object=_TEXT, created=_INT, model=_TEXT, choices=choices, usage=usage)
    native = _object(text=_TEXT, output_ids=_array(_INT), meta_info=_object(id=_TEXT))
    natives: Schema = {"anyOf": [native, _array(native)]}
    model = _object(id=_TEXT, object=_TEXT, created=_INT, owned_by=_TEXT, max_model_len=_NULL_OR_INT)
    tokens = _object(tokens=_array(_INT), count=_INT, max_model_len=_NULL_OR_INT)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": "1", "license": {"name": "Apache-2.0"}},
        "paths": {
            "/v1/chat/completions": _post("a chat's next message", "ChatBody", answer, streamed),
            "/v1/completions": _post("texts that go on from prompts", "CompletionBody", answer, streamed),
            "/v1/models": _get("the models served here", _object(object=_TEXT, data=_array(model)), 401),
            "/v1/models/{model}": _named("model", _get("a model", model, 401, 404)),
            "/v1/responses": _post("an answer, kept for later turns", "ResponseBody", _response(), streamed),
            "/v1/responses/{id}": _named(
                "id",
                {
                    **_get("an answer that is kept", _response(), 401, 404, 503),
                    **_get(
                        "forget it",
                        _object(id=_TEXT, deleted={"const": True}),
                        401,
                        404,
                        503,
                        method="delete",
                    ),
                },
            ),
            "/v1/embeddings": _post("texts as vectors", "EmbeddingBody", _vectors()),
            "/v1/messages": _post(
                "a conversation's next message", "MessagesBody", _message(), streamed, "AnthropicError"
            ),
            "/v1/messages/count_tokens": _post(
                "its tokens", "CountTokensBody", _object(input_tokens=_INT), None, "AnthropicError"
            ),
            "/generate": _post("tokens that go on from prompts", "GenerateBody", natives, streamed),
            "/tokenize": _post("the token ids of a text or of a chat", "TokenizeBody", tokens),
            "/detokenize": _post("the text of token ids", "DetokenizeBody", _object(prompt=_TEXT)),
            "/health": _get("503: this router is to be replaced", _object(status=_TEXT), 503),
            "/ready": _get("503 until a decode worker is there", _object(status=_TEXT), 503),
            "/ping": _get("as /health", _object(status=_TEXT), 503),
            "/health_generate": _get(
                "200 when a worker has computed a token", _object(status=_TEXT), 401, 429, 500, 503
            ),
            "/get_model_info": _get(
                "the model", _object(model_path=_TEXT, is_generation={"type": "boolean"}), 401
            ),
            "/version": _get("the version that is installed", _object(version=_TEXT)),
            "/openapi.json": _get("this document", {"type": "object"}, 401),
        },
        "components": {"schemas": {**_request_schemas(model_names), **_error_schemas()}},
    }


_TEXT: Schema = {"type": "string"}
_INT: Schema = {"type": "integer"}
_NULL_OR_INT: Schema = {"type": ["integer", "null"]}
_TEXT_PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": _TEXT},
}
_REFUSAL_PART: Schema = {
    "type": "object",
    "required": ["type", "refusal"],
    "properties": {"type": {"const": "refusal"}, "refusal": _TEXT},
}
_PARTS: Schema = {"type": "array", "items": {"anyOf": [_TEXT_PART, _REFUSAL_PART]}}
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": _TEXT,
        "content": {"anyOf": [_TEXT, _PARTS, {"type": "null"}]},
    },
}


def _object(**properties: Schema) -> Schema:
    """All of them are always there, and there may be more."""
    return {"type": "object", "required": list(properties), "properties": properties}


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _request_schemas(model_names: Sequence[str]) -> Schema:
    _, generated = models_json_schema([(body, "validation") for body in _BODIES], ref_template=_REF)
    schemas: Schema = generated["$defs"]
    for title, example in _examples(model_names[0]).items():
        schemas[title]["examples"] = [example]
    # What the models say more loosely: these are checked after them, so that an error names what is wrong.
    messages = {**schemas["ChatBody"]["properties"]["messages"], "items": _MESSAGE}
    narrower: Schema = {
        "model": {"enum": list(model_names)},
        "sampling_params": {"$ref": _REF.format(model="NativeSampling")},
    }
    schemas["ChatBody"]["properties"]["messages"] = messages
    schemas["TokenizeBody"]["properties"]["messages"] = messages
    for body in _BODIES:
        if issubclass(body, RequestBody | SamplingBody):
            schemas[body.__name__]["properties"] |= _others(body)
    for schema in schemas.values():
        for name, field in schema.get("properties", {}).items():
            said = narrower.get(name, field)
            optional = name not in schema.get("required", ())  # null counts as absent
            schema["properties"][name] = {"anyOf": [said, {"type": "null"}]} if optional else said
    return schemas


def _others(body: type[BaseModel]) -> Schema:
    """What requests to other servers have, and a body here takes where it asks for nothing."""
    return {
        name: {"description": other.why, **({} if other.harmless is None else {"enum": list(other.harmless)})}
        for name, other in OTHER_FIELDS.items()
        if name not in body.model_fields and (other.harmless is None or other.harmless)
    }


def _examples(model_name: str) -> Schema:
    """One of each body that a path takes."""
    messages = [{"role": "user", "content": "Say something"}]
    return {
        "ChatBody": {"model": model_name, "messages": messages, "max_tokens": 16},
        "CompletionBody": {"model": model_name, "prompt": "Once upon a time", "max_tokens": 16},
        "ResponseBody": {"model": model_name, "input": "Say something", "max_output_tokens": 16},
        "EmbeddingBody": {"model": model_name, "input": "Once upon a time"},
        "MessagesBody": {"model": model_name, "messages": messages, "max_tokens": 16},
        "CountTokensBody": {"model": model_name, "messages": messages},
        "GenerateBody": {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 16}},
        "TokenizeBody": {"messages": messages},
        "DetokenizeBody": {"tokens": [1, 2, 3]},
    }


def _error_schemas() -> Schema:
    text_or_null: Schema = {"type": ["string", "null"]}
    error = _object(message=_TEXT, type=_TEXT, param=text_or_null, code=text_or_null)
    return {
        "Error": _object(error=error),
        "AnthropicError": _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT)),
    }


def _response() -> Schema:
    usage = _object(input_tokens=_INT, output_tokens=_INT, total_tokens=_INT)
    items = _array(_object(type=_TEXT))
    status = {"enum": ["completed", "incomplete"]}
    return _object(
        id=_TEXT, object=_TEXT, created_at=_INT, model=_TEXT, status=status, output=items, usage=usage
    )


def _vectors() -> Schema:
    vector: Schema = {"anyOf": [_array({"type": "number"}), _TEXT]}
    data = _array(_object(object=_TEXT, index=_INT, embedding=vector))
    return _object(object=_TEXT, data=data, model=_TEXT, usage=_object(prompt_tokens=_INT, total_tokens=_INT))


def _message() -> Schema:
    usage = _object(input_tokens=_INT, cache_read_input_tokens=_INT, output_tokens=_INT)
    blocks = _array(_object(type=_TEXT))
    return _object(
        id=_TEXT, type={"const": "message"}, role={"const": "assistant"}, model=_TEXT, content=blocks,
        stop_reason=_TEXT, usage=usage,
    )  # fmt: skip


def _get(summary: str, answer: Schema, *errors: int, method: str = "get") -> Schema:
    return {method: {"summary": summary, "responses": _responses(answer, {}, *errors, 405)}}


def _named(name: str, path: Schema) -> Schema:
    """A path that ends with a name."""
    named: Schema = {"name": name, "in": "path", "required": True, "schema": _TEXT}
    return {method: {**said, "parameters": [named]} for method, said in path.items()}


def _post(
    summary: str, body: str, answer: Schema, streamed: Schema | None = None, error: str = "Error"
) -> Schema:
    content = {"application/json": {"schema": {"$ref": _REF.format(model=body)}}}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": content},
            "responses": _responses(answer, streamed or {}, *_ERRORS, error=error),
        }
    }


def _responses(answer: Schema, streamed: Schema, *errors: int, error: str = "Error") -> Schema:
    told = {"application/json": {"schema": {"$ref": _REF.format(model=error)}}}
    ok = {"application/json": {"schema": answer}, **streamed}
    return {
        "200": {"description": "the answer", "content": ok},
        **{str(status): {"description": _ERRORS[status], "content": told} for status in errors},
    }
