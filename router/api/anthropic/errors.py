"""Errors as Anthropic's API has them: {"type": "error", "error": {"type", "message"}}."""

from __future__ import annotations

from typing import Any

from common.errors import BatonError, ContextTooLong
from router.http_errors import to_http

PATH = "/v1/messages"
_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    410: "api_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_anthropic(path: str) -> bool:
    """Whether a path is of this API, whose clients expect its errors."""
    return path == PATH or path.startswith(PATH + "/")


def anthropic_body(status: int, message: str) -> dict[str, Any]:
    """Anthropic's error object."""
    kind = _KINDS.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def anthropic_error(error: BatonError) -> dict[str, Any]:
    """The same, of an error. Agents know by its first words that a conversation has to be shortened."""
    prefix = "prompt is too long: " if isinstance(error, ContextTooLong) else ""
    return anthropic_body(to_http(error).status, f"{prefix}{error}")
