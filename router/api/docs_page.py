"""GET /docs: a page that shows /openapi.json. Its files are in docs/; nothing is fetched from elsewhere."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from router.api.asgi import Headers, HttpRequest
from router.service import Router

_KINDS = {
    "index.html": b"text/html; charset=utf-8",
    "docs.js": b"text/javascript; charset=utf-8",
    "docs.css": b"text/css; charset=utf-8",
}
PATHS = {"/docs": "index.html", "/docs/docs.js": "docs.js", "/docs/docs.css": "docs.css"}
"""Served without a key: they say nothing of this server."""
_POLICY = (
    b"content-security-policy",
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
)


async def docs(_: Router, request: HttpRequest) -> None:
    """One of the page's files."""
    name = PATHS[request.path]
    headers: Headers = [(b"content-type", _KINDS[name]), _POLICY]
    await request.respond(200, _read(name), headers)


@cache
def _read(name: str) -> bytes:
    return files("router.api").joinpath("docs", name).read_bytes()
