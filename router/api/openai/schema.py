"""Request bodies. What is not here is refused by name: a field silently ignored is a wrong answer."""

from __future__ import annotations

import random
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from common.errors import InvalidRequest
from wire.messages import SamplingParams

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Body = TypeVar("Body", bound=BaseModel)
_MOST_STOPS = 16
_MOST_LOGPROBS = 20


class StreamOptions(BaseModel):
    """OpenAI's stream_options."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False


class SamplingBody(BaseModel):
    """What every way to ask for tokens has in common."""

    # Empty collections come from factories: pydantic deep-copies a default, which took half of the parsing.
    model_config = ConfigDict(extra="forbid")

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, description="0 or -1: off")
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = None
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0)
    logit_bias: dict[TokenId, float] = Field(default_factory=dict)
    min_tokens: int = Field(0, ge=0)
    stop: str | list[str] = Field(default_factory=list)
    stop_token_ids: list[TokenId] = Field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: int = Field(1, ge=1, le=128)

    def stops(self) -> tuple[str, ...]:
        """Stop strings. Raises InvalidRequest for too many, or an empty one."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if len(stops) > _MOST_STOPS or not all(stops):
            raise InvalidRequest(f"stop takes at most {_MOST_STOPS} strings, none of them empty", "stop")
        return stops

    def sampling(self, max_new_tokens: int, top_logprobs: int | None, vocab_size: int) -> SamplingParams:
        """For the workers. A seed is drawn when none is given. Raises InvalidRequest for foreign tokens."""
        for name, tokens in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in tokens:
                if token >= vocab_size:
                    raise InvalidRequest(f"token {token} is not in the vocabulary of {vocab_size}", name)
        if self.min_tokens > max_new_tokens:
            raise InvalidRequest(
                f"min_tokens {self.min_tokens} exceeds the {max_new_tokens} tokens asked for", "min_tokens"
            )
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_k=max(0, self.top_k),
            top_p=self.top_p,
            min_p=self.min_p,
            seed=random.getrandbits(63) if self.seed is None else self.seed % (1 << 63),
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            top_logprobs=top_logprobs,
        )


class OpenAIBody(SamplingBody):
    """What chat and completions have in common."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str = ""
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: str = ""
    extra_key: str = ""
    prompt_cache_key: str = ""  # a session: a hint that such requests have much in common

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

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=_MOST_LOGPROBS)
    best_of: int | None = None
    echo: Literal[False] = False
    suffix: Literal[""] = ""
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _best_of_is_n(self) -> Self:
        if self.best_of is not None and self.best_of != self.n:
            raise InvalidRequest("best_of other than n is not supported", "best_of")
        return self


class ChatBody(OpenAIBody):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=_MOST_LOGPROBS)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] = "auto"
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True

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

    def plain_messages(self) -> list[dict[str, Any]]:
        """Messages whose content is text: a list of text parts becomes its text, other parts are refused."""
        return [_plain_message(message, i) for i, message in enumerate(self.messages)]


def parse(kind: type[Body], raw: dict[str, Any]) -> Body:
    """A body of that kind; null means unset. Raises InvalidRequest naming the field that is wrong."""
    try:
        return kind.model_validate({key: value for key, value in raw.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = str(first["loc"][0]) if first["loc"] else None
        if first["type"] == "extra_forbidden":
            raise InvalidRequest(f"the field {param!r} is not supported", param) from None
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(f"{where}: {first['msg']}", param) from None


def _plain_message(message: dict[str, Any], position: int) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(f"messages.{position}.role: a string is needed", "messages")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    if not isinstance(content, list):
        raise InvalidRequest(f"messages.{position}.content: text or a list of parts is needed", "messages")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest(f"messages.{position}.content: only text parts are supported", "messages")
        texts.append(part["text"])
    return {**message, "content": "\n".join(texts)}
