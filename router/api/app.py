"""The HTTP edge as an ASGI application: under uvicorn, or mounted inside another application."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import msgspec

from common.errors import BatonError, Unauthorized
from router.api import docs_page, health, native_endpoints, openapi
from router.api.anthropic import endpoints as anthropic
from router.api.anthropic.errors import anthropic_body, anthropic_error, is_anthropic
from router.api.asgi import JSON, App, ClientLeft, HttpRequest, Receive, Scope, Send
from router.api.cors import Cors
from router.api.openai import embeddings, endpoints
from router.api.openai.responses import endpoints as responses
from router.http_errors import error_body, to_http
from router.keys import Key
from router.request_lines import RequestLine, error_name, iso_time
from router.service import Router

Handler = Callable[[Router, HttpRequest], Awaitable[None]]

_ROUTES: dict[tuple[str, str], Handler] = {
    ("POST", "/v1/chat/completions"): endpoints.chat_completions,
    ("POST", "/v1/completions"): endpoints.completions,
    ("GET", "/v1/models"): endpoints.models,
    ("POST", "/v1/responses"): responses.create,
    ("POST", "/v1/embeddings"): embeddings.embeddings,
    ("POST", "/v1/messages"): anthropic.messages,
    ("POST", "/v1/messages/count_tokens"): anthropic.count_tokens,
    ("POST", "/generate"): native_endpoints.generate,
    ("POST", "/tokenize"): native_endpoints.tokenize,
    ("POST", "/detokenize"): native_endpoints.detokenize,
    ("GET", "/health"): health.health,
    ("GET", "/ready"): health.ready,
    ("GET", "/ping"): health.health,
    ("GET", "/health_generate"): native_endpoints.health_generate,
    ("GET", "/get_model_info"): native_endpoints.get_model_info,
    ("GET", "/version"): health.version,
    ("GET", "/openapi.json"): openapi.openapi,
    **{("GET", path): docs_page.docs for path in docs_page.PATHS},
}
_BELOW: dict[tuple[str, str], Handler] = {  # paths that end with a name
    ("GET", endpoints.MODEL_PATH): endpoints.model,
    ("GET", responses.RESPONSE_PATH): responses.retrieve,
    ("DELETE", responses.RESPONSE_PATH): responses.delete,
}
_FOR_ALL = frozenset({"/health", "/ready", "/ping", "/version", *docs_page.PATHS})  # also without a key
_CLIENT_LEFT = 499  # as nginx counts it: no answer was begun
_FAILED = 500
_NO_WEBSOCKET = "there are no websockets here: streams are server-sent events (stream=true)"
_PATHS = {path for _, path in _ROUTES}


def build_app(router: Router) -> App:
    """The application that serves a router. It does not close the router."""

    cors = Cors(router.options.cors_origins, lambda: router.membership.admins)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            limit = router.options.max_body_bytes
            await _serve(router, HttpRequest(scope, receive, send, router.clients, limit), cors)
        elif scope["type"] == "websocket":
            await _refuse_websocket(scope, receive, send)

    return app


async def _serve(router: Router, request: HttpRequest, cors: Cors) -> None:
    """Answer, and count the answer, whatever becomes of it: its client may leave at any time, upon which
    Serve's proxy cancels this task."""
    try:
        request.further_headers = cors.headers(request)
        _trace(router, request)
        await _answer(router, request, cors)
    except ClientLeft:
        pass
    except Exception:
        request.status = request.status or _FAILED
        raise
    finally:
        status = request.status or _CLIENT_LEFT
        router.metrics.requests.inc(1, str(status))
        if request.span is not None:
            request.span.end(status)
        if router.request_lines is not None and request.path not in _FOR_ALL:
            router.request_lines.write(_line(request, status))


def _line(request: HttpRequest, status: int) -> RequestLine:
    span = request.span
    return RequestLine(
        iso_time(request.arrived_ns), request.request_id, request.method, request.path, status,
        (time.time_ns() - request.arrived_ns) / 1e9, "" if span is None else span.traceparent.split("-")[1],
        request.error, request.generated,
    )  # fmt: skip


def _trace(router: Router, request: HttpRequest) -> None:
    """Begin the request's span, if traces are on and this one is sampled. The answer names it."""
    if router.tracing is None or request.method != "POST" or _handler(request) is None:
        return
    span = router.tracing.start(f"POST {request.path}", request.headers(), request.arrived_ns)
    if span is not None:
        request.span = span
        request.further_headers = [*request.further_headers, (b"traceresponse", span.traceparent.encode())]


async def _answer(router: Router, request: HttpRequest, cors: Cors) -> None:
    handler = _handler(request)
    try:
        if cors.is_preflight(request):
            await cors.answer_preflight(request)
        elif handler is not None:
            if request.path not in _FOR_ALL and router.keys.required:
                shown = request.header(b"authorization"), request.header(b"x-api-key")
                request.key = _checked(router.keys.find(*shown))
            await handler(router, request)
        else:
            await _no_route(request)
    except BatonError as error:
        router.metrics.rejected(error)
        request.error = error_name(error)
        told = to_http(error)
        body = anthropic_error(error) if is_anthropic(request.path) else told.body
        await request.respond_json(body, told.status, told.headers)


def _handler(request: HttpRequest) -> Handler | None:
    handler = _ROUTES.get((request.method, request.path))
    for (method, path), below in _BELOW.items():
        if handler is None and request.method == method and request.path.startswith(path):
            handler = below
    return handler


def _checked(key: Key | None) -> Key:
    if key is None:
        raise Unauthorized("an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY")
    return key


async def _no_route(request: HttpRequest) -> None:
    if (request.header(b"upgrade") or "").lower() == "websocket":
        status, told = 400, _NO_WEBSOCKET
    elif request.path in _PATHS or any(request.path.startswith(path) for _, path in _BELOW):
        status, told = 405, f"{request.path} does not take {request.method}"
    else:
        status, told = 404, f"{request.path} does not exist"
    if is_anthropic(request.path):
        await request.respond_json(anthropic_body(status, told), status)
    else:
        await request.respond_json(error_body(told, "invalid_request_error"), status)


async def _refuse_websocket(scope: Scope, receive: Receive, send: Send) -> None:
    """With the reason, where the server can send one; else it answers 403."""
    await receive()  # websocket.connect
    if "websocket.http.response" not in (scope.get("extensions") or {}):
        await send({"type": "websocket.close", "reason": _NO_WEBSOCKET})
        return
    body = msgspec.json.encode(error_body(_NO_WEBSOCKET, "invalid_request_error"))
    await send({"type": "websocket.http.response.start", "status": 400, "headers": [JSON]})
    await send({"type": "websocket.http.response.body", "body": body})


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
