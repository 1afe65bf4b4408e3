"""The body of a request to /v1/responses."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from common.errors import InvalidRequest
from router.api.chat_fields import ChatFields, ReasoningEffort
from router.api.openai.responses.history import template_messages
from router.api.openai.responses.items import GivenItem, GivenItems, Item, MessageItem, is_unfinished
from router.api.openai.responses.tools import FunctionChoice, FunctionTools, tool_fields
from router.api.request_body import Label, OutputLength, RequestBody, SamplingBody, Text
from router.api.tool_fields import ToolFields
from router.text.chat import Chat
from router.text.grammars import Wanted
from router.text.tool_formats.syntax import Markers
from wire.request import GrammarKind
from wire.sampling_ranges import MOST_TOP_LOGPROBS

_ANY_OBJECT = {"type": "object"}


class TextFormat(BaseModel):
    """What the text of an answer must match."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    name: Label = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None  # it is followed in either case


class TextConfig(BaseModel):
    """OpenAI's text."""

    model_config = ConfigDict(extra="forbid")

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(BaseModel):
    """OpenAI's reasoning. Who asks for a summary gets the reasoning itself, in the form of one."""

    model_config = ConfigDict(extra="forbid")

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None

    @property
    def wants_summary(self) -> bool:
        """By either name; the older one goes."""
        return (self.summary or self.generate_summary) is not None


class ResponseStreamOptions(BaseModel):
    """OpenAI's stream_options. Without obfuscation, lengths of events say lengths of texts; so it is here."""

    model_config = ConfigDict(extra="forbid")

    include_obfuscation: bool | None = None


class ResponseBody(RequestBody, SamplingBody):
    """POST /v1/responses."""

    model: Label | None = None
    input: Text | GivenItems
    instructions: Text | None = Field(None, description="a system message; not of later turns")
    previous_response_id: Label | None = None
    store: bool = Field(True, description="kept for later turns, within bounds")
    max_output_tokens: OutputLength | None = None
    text: TextConfig | None = None
    tools: FunctionTools = Field(default_factory=list, description="functions, which the client calls")
    tool_choice: FunctionChoice = "auto"
    parallel_tool_calls: bool = Field(True, description="false: an answer has one call at most")
    reasoning: ReasoningConfig | None = None
    metadata: dict[Label, str] | None = Field(None, max_length=16, description="told in the answer")
    prompt_cache_key: Label = ""
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = Field(
        None, description="told in the answer"
    )
    safety_identifier: Label | None = Field(None, description="told in the answer")
    truncation: Literal["disabled"] = Field("disabled", description="only disabled")
    n: int = Field(1, ge=1, le=128, description="only 1")
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] = Field(
        default_factory=list, max_length=16, description="reasoning is plain text in its items"
    )
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    stream_options: ResponseStreamOptions | None = None

    @model_validator(mode="after")
    def _one_answer(self) -> Self:
        if self.n != 1:
            raise InvalidRequest("a response has one answer: only 1 is supported", "n")
        return self

    @property
    def items(self) -> list[GivenItem]:
        """What is said in this turn."""
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input)]
        return self.input

    @property
    def scored(self) -> int | None:
        """How many of the best tokens are told beside each one of the text; None: not even its own."""
        if self.top_logprobs is None and "message.output_text.logprobs" not in self.include:
            return None
        return self.top_logprobs or 0

    def tool_fields(self) -> ToolFields:
        """The tools, as a chat has them."""
        return tool_fields(self.tools, self.tool_choice, self.parallel_tool_calls)

    def make_chat(self, before: list[dict[str, Any]], items: list[Item]) -> Chat:
        """For the chat template; `before` are the messages of earlier turns, `items` those of this one, none
        of them a reference. Raises InvalidRequest."""
        said = [*before, *template_messages(before, items)]
        if self.instructions is not None:
            said = [{"role": "system", "content": self.instructions}, *said]
        effort = None if self.reasoning is None else self.reasoning.effort
        fields = ChatFields(reasoning_effort=effort, continue_final_message=is_unfinished(items[-1]))
        return fields.make_chat(said, self.tool_fields().callable_tools())

    def wanted_grammar(self, markers: Markers) -> Wanted | None:
        """What the answer must match. Raises InvalidRequest for more than one."""
        other = super().wanted_grammar(markers)
        form = None if self.text is None else self.text.format
        if form is None or form.type == "text":
            return other
        if other is not None:
            raise InvalidRequest(f"{other.param} cannot be given together with text.format", other.param)
        if (form.schema_ is None) != (form.type == "json_object"):
            raise InvalidRequest("text.format.schema belongs to type 'json_schema'", "text.format")
        schema = _ANY_OBJECT if form.schema_ is None else form.schema_
        return Wanted("text.format.schema", GrammarKind.JSON_SCHEMA, schema)
