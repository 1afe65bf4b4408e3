"""Which pages of other sites may read answers in a browser (CORS, https://fetch.spec.whatwg.org)."""

from __future__ import annotations

from collections.abc import Callable, Collection

from router.api.asgi import Headers, HttpRequest

_ANY = "*"
_PREFLIGHT_S = b"600"


class Cors:
    """The origins that were allowed, and those of the routers' admin listeners, where the playground is.
    Browsers keep answers from pages of all others."""

    def __init__(self, origins: tuple[str, ...], admins: Callable[[], Collection[str]]) -> None:
        """`origins` as browsers write them, https://example.org; "*": all. `admins`: those of admin
        listeners."""
        self._origins = frozenset(origins)
        self._admins = admins

    def headers(self, request: HttpRequest) -> Headers:
        """What an answer to this request says about its origin."""
        origin = request.header(b"origin")
        if origin is None:
            return []
        if not self._allowed(origin):
            return [(b"vary", b"origin")] if self._origins else []
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", b"x-request-id, retry-after"),
            (b"vary", b"origin"),
        ]

    def is_preflight(self, request: HttpRequest) -> bool:
        """Whether a browser asks what it may send."""
        if request.method != "OPTIONS" or request.header(b"access-control-request-method") is None:
            return False
        return bool(self._origins) or self._allowed(request.header(b"origin") or "")

    async def answer_preflight(self, request: HttpRequest) -> None:
        """Any method and any header of the API; credentials are headers here, no cookies."""
        asked = (request.header(b"access-control-request-headers") or "").encode("latin-1")
        allowed: Headers = [
            (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
            (b"access-control-allow-headers", asked),
            (b"access-control-max-age", _PREFLIGHT_S),
        ]
        await request.respond(204, b"", allowed)

    def _allowed(self, origin: str) -> bool:
        return _ANY in self._origins or origin in self._origins or origin in self._admins()
