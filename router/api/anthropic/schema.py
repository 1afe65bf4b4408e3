"""The bodies of requests to Anthropic's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from common.errors import InvalidRequest
from router.api.anthropic.blocks import Messages, Texts
from router.api.anthropic.history import template_messages
from router.api.anthropic.tools import ClientToolChoice, ClientTools, tool_fields
from router.api.chat_fields import ChatFields
from router.api.request_body import Label, OutputLength, RequestBody, SamplingBody, Text
from router.api.tool_fields import ToolFields
from router.text.chat import Chat
from router.text.grammars import Wanted
from wire.request import GrammarKind
from wire.sampling_ranges import PROBABILITY, TEMPERATURE

_StopSequence = Annotated[str, Field(min_length=1, max_length=1024)]


class Metadata(BaseModel):
    """Anthropic's metadata. Nothing is done with it."""

    model_config = ConfigDict(extra="forbid")

    user_id: str | None = None


class Thinking(BaseModel):
    """Whether the model thinks first, for templates that know it."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized"] | None = None

    @property
    def budget(self) -> int | None:
        """After how many tokens thoughts end; None: when the model ends them."""
        return self.budget_tokens if self.type == "enabled" else None

    def template_kwargs(self) -> dict[str, Any]:
        """What the chat template is given. Adaptive: as the template does by itself."""
        if self.type == "adaptive":
            return {}
        return {"enable_thinking": self.type == "enabled", "thinking": self.type == "enabled"}


class OutputFormat(BaseModel):
    """A schema that the answer's text follows."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    """Anthropic's output_config."""

    model_config = ConfigDict(extra="forbid")

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesChat(BaseModel):
    """The conversation."""

    model_config = ConfigDict(extra="forbid")

    model: Label | None = None
    messages: Messages
    system: Text | Texts = ""
    thinking: Thinking | None = Field(
        None,
        description="default: as the chat template does by itself; budget_tokens limits tagged thoughts",
    )
    output_config: OutputConfig | None = None
    cache_control: Any = Field(None, description="changes nothing: caching is automatic")
    tools: ClientTools = Field(default_factory=list, description="those that the client calls")
    tool_choice: ClientToolChoice = ClientToolChoice()

    def tool_fields(self) -> ToolFields:
        """The tools, as a chat has them. Raises InvalidRequest."""
        return tool_fields(self.tools, self.tool_choice)

    def make_chat(self) -> Chat:
        """For the chat template. Raises InvalidRequest."""
        messages = template_messages(self.system, self.messages)
        goes_on = messages[-1]["role"] == "assistant"
        if goes_on and "tool_calls" in messages[-1]:
            raise InvalidRequest("the last message calls tools: their results are missing", "messages")
        fields = ChatFields(
            continue_final_message=goes_on,
            chat_template_kwargs={} if self.thinking is None else self.thinking.template_kwargs(),
            reasoning_effort=None if self.output_config is None else self.output_config.effort,
        )
        return fields.make_chat(messages, self.tool_fields().callable_tools())


class CountTokensBody(MessagesChat):
    """POST /v1/messages/count_tokens."""


class MessagesBody(RequestBody, MessagesChat):
    """POST /v1/messages."""

    max_tokens: OutputLength
    stop_sequences: list[_StopSequence] = Field(default_factory=list, max_length=16, fail_fast=True)
    temperature: float | None = Field(None, ge=TEMPERATURE.low, le=TEMPERATURE.high)
    top_p: float | None = Field(None, gt=PROBABILITY.low, le=PROBABILITY.high)
    top_k: int | None = Field(None, ge=0, lt=2**31, description="0: off")
    metadata: Metadata | None = Field(None, description="changes nothing")

    def sampling_fields(self) -> SamplingBody:
        """How tokens are sampled."""
        return SamplingBody(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, stop=self.stop_sequences
        )

    def wanted_grammar(self) -> Wanted | None:
        """What the answer must match."""
        form = None if self.output_config is None else self.output_config.format
        if form is None:
            return None
        return Wanted("output_config.format.schema", GrammarKind.JSON_SCHEMA, form.schema_)
