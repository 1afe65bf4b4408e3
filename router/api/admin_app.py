"""The admin listener as an ASGI application: /metrics, /debug and /admin, behind a key of their own, and the
dashboard at /."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable
from urllib.parse import quote

from common.errors import BatonError, Unauthorized
from router.api.asgi import App, Headers, Receive, Scope, Send
from router.api.live_answer import answer_live
from router.dashboard.assets import POLICY, find_asset
from router.dashboard.live import LiveFeed
from router.http_errors import error_body, to_http
from router.keys import Keys
from router.page import CHANGE, CHANGES, Page, forgotten_tenant, json_page

_LIVE = "/admin/live"


def build_admin_app(open_page: Callable[[str], Awaitable[Page]], live: LiveFeed, keys: Keys) -> App:
    """The application. `open_page` is asked for the page at a path with its query string."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "the listener serves nothing else"
        asset = find_asset(scope["path"]) if scope["method"] == "GET" else None
        if asset is not None:
            await _send_page(send, asset, [POLICY])
            return
        headers = {bytes(name): bytes(value).decode("latin-1") for name, value in scope["headers"]}
        try:
            _check(headers, keys, scope["method"])
            if scope["path"] == _LIVE and scope["method"] == "GET":
                await answer_live(live, receive, send)
                return
            page = await _page(scope, open_page)
            extra = []
        except BatonError as error:
            told = to_http(error)
            page, extra = json_page(told.body, told.status), told.headers
        await _send_page(send, page, extra)

    return app


async def _send_page(send: Send, page: Page, extra: Headers) -> None:
    body = page.body.encode()
    head = [(b"content-type", page.kind.encode()), (b"content-length", str(len(body)).encode()), *extra]
    await send({"type": "http.response.start", "status": page.status, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def _page(scope: Scope, open_page: Callable[[str], Awaitable[Page]]) -> Page:
    path, method = scope["path"], scope["method"]
    methods = ("GET", "POST") if path in CHANGES else ("GET",)
    if forgotten_tenant(path) is not None:
        methods = ("POST",)
    if method not in methods:
        told = f"{path} takes {' and '.join(methods)} only"
        return json_page(error_body(told, "invalid_request_error"), 405)
    target = f"{quote(path)}?{scope['query_string'].decode('latin-1')}"
    return await open_page(CHANGE + target if method == "POST" else target)


def _check(headers: dict[bytes, str], keys: Keys, method: str) -> None:
    """Raises Unauthorized."""
    if method != "GET" and b"origin" in headers:
        # A page of another site can make a browser on this machine POST here. Then the browser says so.
        raise Unauthorized("changes are not taken from pages in browsers")
    if keys.required:
        if keys.find(headers.get(b"authorization")) is None:
            raise Unauthorized("this listener wants its key: Authorization: Bearer KEY")
    elif not _is_address(headers.get(b"host", "")):
        # A page in a browser of this machine may have a name that leads here (DNS rebinding).
        raise Unauthorized("without a key, this listener is asked by its address")


def _is_address(host: str) -> bool:
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
