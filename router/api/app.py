"""The HTTP edge as an ASGI application: under uvicorn, or mounted inside another application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from common.errors import BatonError, Unauthorized
from router.api import health, native_endpoints, openapi
from router.api.asgi import App, ClientLeft, HttpRequest, Receive, Scope, Send
from router.api.openai import endpoints
from router.http_errors import error_body, to_http
from router.keys import Key
from router.service import Router

Handler = Callable[[Router, HttpRequest], Awaitable[None]]

_ROUTES: dict[tuple[str, str], Handler] = {
    ("POST", "/v1/chat/completions"): endpoints.chat_completions,
    ("POST", "/v1/completions"): endpoints.completions,
    ("GET", "/v1/models"): endpoints.models,
    ("POST", "/generate"): native_endpoints.generate,
    ("POST", "/tokenize"): native_endpoints.tokenize,
    ("POST", "/detokenize"): native_endpoints.detokenize,
    ("GET", "/health"): health.health,
    ("GET", "/ready"): health.ready,
    ("GET", "/version"): health.version,
    ("GET", "/openapi.json"): openapi.openapi,
}
_FOR_ALL = frozenset({"/health", "/ready", "/version"})  # also without a key
_PATHS = {path for _, path in _ROUTES}


def build_app(router: Router) -> App:
    """The application that serves a router. It does not close the router."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            limit = router.options.max_body_bytes
            await _serve(router, HttpRequest(scope, receive, send, router.clients, limit))
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})

    return app


async def _serve(router: Router, request: HttpRequest) -> None:
    handler = _ROUTES.get((request.method, request.path))
    try:
        if handler is not None:
            if request.path not in _FOR_ALL and router.keys.required:
                request.key = _checked(router.keys.find(request.header(b"authorization")))
            await handler(router, request)
        else:
            await _no_route(request)
    except BatonError as error:
        told = to_http(error)
        await request.respond_json(told.body, told.status, told.headers)
    except ClientLeft:
        return
    router.metrics.requests.inc(of=str(request.status))


def _checked(key: Key | None) -> Key:
    if key is None:
        raise Unauthorized("an API key is needed: Authorization: Bearer KEY")
    return key


async def _no_route(request: HttpRequest) -> None:
    if request.path in _PATHS:
        body = error_body(f"{request.path} does not take {request.method}", "invalid_request_error")
        await request.respond_json(body, 405)
    else:
        body = error_body(f"{request.path} does not exist", "invalid_request_error")
        await request.respond_json(body, 404)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
