"""ApiClient: streams answers of a server with OpenAI's API, and times them."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

from common.errors import BatonError, ConfigError

API_KEY = "OPENAI_API_KEY"
"""Where the commands find the server's key."""

_CONNECT_S = 10.0
_DATA = "data:"
_DONE = "[DONE]"


class AnswerFailed(BatonError):
    """A request got no whole answer; the message says why."""


@dataclass(slots=True)
class TimedAnswer:
    """One streamed answer. Times are seconds of `time.perf_counter`."""

    sent_at: float
    piece_times: list[float] = field(default_factory=list)  # when each piece of text came
    ended_at: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    request_id: str = ""


class ApiClient:
    """An asynchronous context manager."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 300.0) -> None:
        """`url` is that of the server, with or without /v1. A server that says nothing for `timeout_s` is
        given up."""
        base = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        try:
            self._http = httpx.AsyncClient(
                base_url=base,
                headers=headers,
                limits=limits,
                timeout=httpx.Timeout(timeout_s, connect=_CONNECT_S),
                trust_env=False,  # a proxy would be measured, too
            )
        except httpx.InvalidURL as error:
            raise ConfigError("url", f"{url!r} is not a URL: {error}", "give http://HOST:PORT") from None
        self.url = base

    async def __aenter__(self) -> ApiClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def only_model(self) -> str:
        """The name of the model that the server has; the first, if there are several. Raises ConfigError."""
        try:
            answer = await self._http.get("/v1/models")
            answer.raise_for_status()
            names = [one["id"] for one in answer.json()["data"]]
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            told = _message(error.response.content) or f"/v1/models answers {status}"
            remedy = f"set {API_KEY} to a key of it" if status == 401 else "give another URL"
            raise ConfigError("url", f"{self.url}: {told}", remedy) from None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            told = f"no server with OpenAI's API answers at {self.url}: {error}"
            raise ConfigError("url", told, "give http://HOST:PORT of a running one") from None
        if not names:
            raise ConfigError("url", f"{self.url} has no model", "wait until it has one")
        return str(names[0])

    async def stream(
        self, path: str, body: Mapping[str, Any], answer: TimedAnswer
    ) -> AsyncIterator[dict[str, Any]]:
        """The first choice of each event of a streamed answer, which is timed in `answer`.

        Raises AnswerFailed.
        """
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        whole = False
        try:
            async with self._http.stream("POST", path, json=asked) as response:
                if response.status_code != 200:
                    told = _message(await response.aread())
                    raise AnswerFailed(f"{response.status_code}: {told or 'without a reason'}")
                answer.request_id = response.headers.get("x-request-id", "")
                async for line in response.aiter_lines():
                    data = line.removeprefix(_DATA).strip() if line.startswith(_DATA) else ""
                    if data == _DONE:
                        whole = True
                        break
                    if data:
                        choice = _take(json.loads(data), answer)
                        if choice is not None:
                            yield choice
        except (httpx.HTTPError, ValueError) as error:
            raise AnswerFailed(f"{type(error).__name__}: {error}") from error
        answer.ended_at = time.perf_counter()
        if not whole:
            raise AnswerFailed("the stream has no end")


def text_of(choice: Mapping[str, Any]) -> tuple[str, str]:
    """What a choice of an event adds to the reasoning, and to the text, of a chat or of a completion."""
    delta = choice.get("delta") or {}
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return str(reasoning), str(delta.get("content") or choice.get("text") or "")


def _take(event: Mapping[str, Any], answer: TimedAnswer) -> dict[str, Any] | None:
    if "error" in event:
        raise AnswerFailed(_told(event["error"]))
    usage = event.get("usage")
    if usage:
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.output_tokens = usage["completion_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    choices = event.get("choices")
    if not choices:
        return None
    choice: dict[str, Any] = choices[0]
    if any(text_of(choice)):
        answer.piece_times.append(time.perf_counter())
    return choice


def _message(body: bytes) -> str:
    """The message of an error in OpenAI's shape, TGI's or FastAPI's; "" for anything else."""
    try:
        told: Any = json.loads(body)
        return _told(told["error"]) if "error" in told else str(told["detail"])
    except (ValueError, TypeError, KeyError):
        return ""


def _told(error: Any) -> str:
    """What an `error` says: an object with a message, or a text, as TGI has it."""
    return str(error.get("message", error) if isinstance(error, dict) else error)
