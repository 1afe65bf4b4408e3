"""Whether the router lives, and which version it is. Everybody may know."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

from common.errors import Unavailable
from router.api.asgi import HttpRequest
from router.service import Router


async def health(router: Router, request: HttpRequest) -> None:
    """GET /health: 200 as long as the event loop runs, and the thread that follows KV events."""
    if not router.healthy:
        raise Unavailable("the thread that follows KV events has ended: this router is to be replaced")
    await request.respond_json({"status": "ok"})


async def ready(router: Router, request: HttpRequest) -> None:
    """GET /ready: 503 until a decode worker is there."""
    if not router.membership.ready:
        raise Unavailable("no decode worker is there yet")
    await request.respond_json({"status": "ready"})


async def version(_: Router, request: HttpRequest) -> None:
    """GET /version."""
    try:
        found = installed_version("baton-serve")
    except PackageNotFoundError:
        found = "unpackaged"  # run from a working directory (Ray's), not installed
    await request.respond_json({"version": found})
