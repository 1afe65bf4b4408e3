"""The bodies of requests to the OpenAI API."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from common.errors import InvalidRequest
from router.api.chat_fields import ChatFields, Messages
from router.api.request_body import Label, OutputLength, Prompts, RequestBody, SamplingBody
from wire.sampling_ranges import MOST_TOP_LOGPROBS


class StreamOptions(BaseModel):
    """OpenAI's stream_options."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False


class OpenAIBody(RequestBody, SamplingBody):
    """What chat and completions have in common."""

    model: Label | None = None
    stream_options: StreamOptions | None = None
    prompt_cache_key: Label = ""  # a session: its requests have much in common

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only for stream=true", "stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(OpenAIBody):
    """POST /v1/completions."""

    prompt: Prompts
    max_tokens: OutputLength = 16
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    best_of: int | None = None
    echo: Literal[False] = False
    suffix: Literal[""] = ""
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _best_of_is_n(self) -> Self:
        if self.best_of is not None and self.best_of != self.n:
            raise InvalidRequest("best_of other than n is not supported", "best_of")
        return self


class ChatBody(OpenAIBody, ChatFields):
    """POST /v1/chat/completions."""

    messages: Messages
    max_tokens: OutputLength | None = None
    max_completion_tokens: OutputLength | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    tool_choice: Literal["auto", "none"] = "auto"
    response_format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.response_format not in (None, {"type": "text"}):
            raise InvalidRequest("only response_format {'type': 'text'} is supported", "response_format")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs=true", "top_logprobs")
        return self

    @property
    def wanted(self) -> int | None:
        """The output length asked for; the newer name wins."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
