"""Which pages of other sites may read answers in a browser (CORS, https://fetch.spec.whatwg.org)."""

from __future__ import annotations

from router.api.asgi import Headers, HttpRequest

_ANY = "*"
_PREFLIGHT_S = b"600"


class Cors:
    """The origins that were allowed. With none, browsers keep answers from other sites' pages."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        """`origins` as browsers write them, https://example.org; "*": all."""
        self._origins = frozenset(origins)

    def headers(self, request: HttpRequest) -> Headers:
        """What an answer to this request says about its origin."""
        origin = request.header(b"origin")
        if origin is None or not self._origins:
            return []
        if _ANY not in self._origins and origin not in self._origins:
            return [(b"vary", b"origin")]
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", b"x-request-id, retry-after"),
            (b"vary", b"origin"),
        ]

    def is_preflight(self, request: HttpRequest) -> bool:
        """Whether a browser asks what it may send."""
        return bool(self._origins) and (
            request.method == "OPTIONS" and request.header(b"access-control-request-method") is not None
        )

    async def answer_preflight(self, request: HttpRequest) -> None:
        """Any method and any header of the API; credentials are headers here, no cookies."""
        asked = (request.header(b"access-control-request-headers") or "").encode("latin-1")
        allowed: Headers = [
            (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
            (b"access-control-allow-headers", asked),
            (b"access-control-max-age", _PREFLIGHT_S),
        ]
        await request.respond(204, b"", allowed)
