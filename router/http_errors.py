"""The errors of common/errors.py as HTTP answers, in OpenAI's shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from common.errors import (
    Aborted,
    BatonError,
    BodyTooLarge,
    ContextTooLong,
    Interrupted,
    InvalidRequest,
    LateBody,
    ModelNotFound,
    Overloaded,
    RequestFailed,
    ResponseNotFound,
    TimeLimit,
    Unauthorized,
    UnsupportedMedia,
    UserError,
)


@dataclass(frozen=True, slots=True)
class HttpError:
    """A status, extra headers, and a body `{"error": {message, type, param, code}}`."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: dict[str, Any]


# The first match counts. What is left is a failure of the router or a worker: a client may try again.
_KINDS: tuple[tuple[type[BatonError], int, str, str | None], ...] = (
    (ContextTooLong, 400, "invalid_request_error", "context_length_exceeded"),
    (InvalidRequest, 400, "invalid_request_error", None),
    (Unauthorized, 401, "invalid_request_error", "invalid_api_key"),
    (ModelNotFound, 404, "invalid_request_error", "model_not_found"),
    (ResponseNotFound, 404, "invalid_request_error", "previous_response_not_found"),
    (BodyTooLarge, 413, "invalid_request_error", None),
    (UnsupportedMedia, 415, "invalid_request_error", None),
    (LateBody, 408, "invalid_request_error", None),
    (Overloaded, 429, "rate_limit_error", "overloaded"),
    (UserError, 400, "invalid_request_error", None),
    (Aborted, 410, "server_error", "aborted"),  # clients send no 410 again
    (TimeLimit, 504, "server_error", "time_limit"),
    (RequestFailed, 500, "server_error", "request_failed"),
    (Interrupted, 503, "service_unavailable", "resume"),
    (BatonError, 503, "service_unavailable", None),
)


def to_http(error: BatonError) -> HttpError:
    """The answer that tells a client of an error."""
    status, kind, code = next((s, k, c) for cls, s, k, c in _KINDS if isinstance(error, cls))
    headers = []
    if isinstance(error, Overloaded):
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    elif status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    elif status == 408:
        headers.append((b"connection", b"close"))  # what still comes on it is the rest of the body
    elif status == 503:
        headers.append((b"retry-after", b"1"))
    elif status == 504:
        headers.append((b"x-should-retry", b"false"))  # OpenAI's clients would: it would take as long again
    param = error.param if isinstance(error, UserError) else None
    return HttpError(status, headers, error_body(str(error), kind, param, code))


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
