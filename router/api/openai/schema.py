"""The bodies of requests to the OpenAI API."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from common.errors import InvalidRequest
from router.api.chat_fields import ChatFields, Messages
from router.api.openai.chat_parts import PartsWanted
from router.api.openai.shown import Shown
from router.api.request_body import Label, OutputLength, Prompts, RequestBody, SamplingBody, Text, TokenId
from router.api.tool_fields import ToolFields
from router.model import Model
from router.text.chat import MOST_TEXT
from wire.sampling_ranges import MOST_LOGPROB_TOKENS, MOST_TOP_LOGPROBS


class StreamOptions(BaseModel):
    """OpenAI's stream_options. Without obfuscation, lengths of events say lengths of texts; so it is here."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        None, description="every chunk has the usage so far, if include_usage"
    )
    include_obfuscation: bool | None = None


class OpenAIBody(RequestBody, SamplingBody):
    """What chat and completions have in common."""

    model: Label | None = None
    stream_options: StreamOptions | None = None
    prompt_cache_key: Label = ""  # a session: its requests have much in common
    session_id: Label = Field("", description="prompt_cache_key, as vLLM and SGLang call it")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, lt=2**31,
        description="at most so many tokens of the prompt are used; -1: as many as the context leaves",
    )  # fmt: skip
    truncation_side: Literal["left", "right"] = Field("left", description="left: the last ones are used")
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MOST_TOP_LOGPROBS,
        description="log-probabilities of the prompt's tokens, which are all computed, cached or not",
    )  # fmt: skip
    logprob_token_ids: list[TokenId] = Field(
        default_factory=list, max_length=MOST_LOGPROB_TOKENS, fail_fast=True,
        description="with logprobs: the tokens whose log-probabilities are told, in place of the best ones",
    )  # fmt: skip
    return_token_ids: bool = Field(False, description="token ids of prompt and output beside the text")
    return_tokens_as_token_ids: bool = Field(False, description="logprobs name a token token_id:N")

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only for stream=true", "stream_options")
        return self

    @property
    def session(self) -> str:
        """What requests share that have much in common."""
        return self.prompt_cache_key or self.session_id

    def shown(self, logprobs: bool) -> Shown:
        """What the answer tells beside its text."""
        options = self.stream_options or StreamOptions()
        usage = options.include_usage is True
        running = usage and options.continuous_usage_stats is True
        return Shown(
            logprobs, usage, running, self.return_token_ids, self.prompt_logprobs,
            self.return_tokens_as_token_ids, bool(self.logprob_token_ids),
        )  # fmt: skip

    def best_told(self, asked: int | None) -> int | None:
        """How many of the best tokens are told at each place; None: there are no log-probabilities."""
        return 0 if self.logprob_token_ids else asked

    @property
    def is_cut(self) -> bool:
        """Whether a prompt may be longer than the context."""
        return self.truncate_prompt_tokens is not None

    def cut(self, prompt: list[int], context: int | None, wanted: int) -> list[int]:
        """What truncate_prompt_tokens leaves of a prompt, with `wanted` output tokens in the context."""
        most = self.truncate_prompt_tokens
        if most == -1:
            most = None if context is None else max(context - wanted, 0)
        if most is None or len(prompt) <= most:
            return prompt
        return prompt[:most] if self.truncation_side == "right" else prompt[len(prompt) - most :]


class CompletionBody(OpenAIBody):
    """POST /v1/completions."""

    prompt: Prompts
    max_tokens: int = Field(16, ge=0, lt=2**31, description="0: with echo, the prompt alone")
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    best_of: int | None = Field(None, description="only as many as n")
    echo: bool = Field(False, description="the text, and logprobs, begin with the prompt")
    suffix: Text = Field("", description="the output stands between the prompt, a text, and this one")
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _best_of_is_n(self) -> Self:
        if self.best_of is not None and self.best_of != self.n:
            raise InvalidRequest("best_of other than n is not supported", "best_of")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens: 0 tokens are an answer with echo only", "max_tokens")
        if self.logprob_token_ids and self.logprobs is None:
            raise InvalidRequest("logprob_token_ids needs logprobs", "logprob_token_ids")
        if self.logprob_token_ids and not self.max_tokens:
            raise InvalidRequest("logprob_token_ids needs an output", "logprob_token_ids")
        if self.suffix and (self.echo or self.is_cut):
            raise InvalidRequest("echo and truncate_prompt_tokens are of prompts without a suffix", "suffix")
        if self.stream and (self.scored is not None or not self.max_tokens):
            raise InvalidRequest(
                "a prompt's log-probabilities, and a prompt alone, are not streamed", "stream"
            )
        return self

    @property
    def scored(self) -> int | None:
        """How many of the best tokens at each place of the prompt are wanted; None: not even its own."""
        echoed = self.logprobs if self.echo else None
        if self.prompt_logprobs is None or echoed is None:
            return echoed if self.prompt_logprobs is None else self.prompt_logprobs
        return max(self.prompt_logprobs, echoed)

    def asked(self, model: Model) -> Prompts:
        """The prompts as the model reads them. Raises InvalidRequest for a suffix that it cannot follow."""
        if not self.suffix:
            return self.prompt
        if model.fill_in is None:
            raise InvalidRequest("this model has no tokens that stand for a suffix", "suffix")
        prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if len(texts) < len(prompts):
            raise InvalidRequest("with a suffix, a prompt is a text", "prompt")
        if len(texts) * len(self.suffix) > MOST_TEXT:
            raise InvalidRequest(f"{len(texts)} prompts with this suffix are too long together", "suffix")
        return [model.fill_in.prompt(text, self.suffix) for text in texts]


class ChatBody(OpenAIBody, ToolFields, ChatFields):
    """POST /v1/chat/completions."""

    messages: Messages
    max_tokens: OutputLength | None = None
    max_completion_tokens: OutputLength | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    include_reasoning: bool = Field(True, description="false: the answer leaves it out")
    thinking_token_budget: int | None = Field(
        None, ge=-1, lt=2**31, description="thoughts end after so many tokens; -1: when the model ends them"
    )
    separate_reasoning: bool = Field(True, description="false: it is part of the content")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest("a prompt's log-probabilities are not streamed", "prompt_logprobs")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs=true", "top_logprobs")
        if self.logprob_token_ids and not self.logprobs:
            raise InvalidRequest("logprob_token_ids needs logprobs=true", "logprob_token_ids")
        return self

    def parts_wanted(self) -> PartsWanted:
        """Which parts of its outputs the answer tells."""
        return PartsWanted(self.include_reasoning, self.parallel_tool_calls)

    @property
    def wanted(self) -> int | None:
        """The output length asked for; the newer name wins."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
