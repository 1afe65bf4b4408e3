"""The messages of Anthropic's API: text, or blocks. `cache_control` is accepted: caching is automatic."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from router.api.chat_fields import MOST_MESSAGES
from router.api.request_body import Label, Text

_MOST_BLOCKS = 8192


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid")

    cache_control: Any = None


class TextBlock(_Block):
    """A text."""

    type: Literal["text"]
    text: Text
    citations: Any = None


class ThinkingBlock(_Block):
    """What the model thought. Its signature is not looked at: thoughts are plain text here."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text = ""


class RedactedThinkingBlock(_Block):
    """Thoughts that only Anthropic can read: they are left out."""

    type: Literal["redacted_thinking"]
    data: Text = ""


class ToolUseBlock(_Block):
    """A call that the model has made."""

    type: Literal["tool_use"]
    id: Label
    name: Text  # a model writes names of any length
    input: dict[str, Any]
    caller: Any = None
    toolset_name: Label | None = None


Texts = Annotated[list[TextBlock], Field(max_length=_MOST_BLOCKS, fail_fast=True)]


class ToolResultBlock(_Block):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: Label
    content: Text | Texts = ""
    is_error: bool = False
    toolset_name: Label | None = None


_OfUser = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
_OfAssistant = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, Field(discriminator="type")
]


class SystemMessage(BaseModel):
    """A system message between others."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system"]
    content: Text | Texts


class UserMessage(BaseModel):
    """What the user says, and what tools gave."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["user"]
    content: Text | Annotated[list[_OfUser], Field(max_length=_MOST_BLOCKS, fail_fast=True)]


class AssistantMessage(BaseModel):
    """What the model has said before. The answer goes on with the last message, if it is one of these."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["assistant"]
    content: Text | Annotated[list[_OfAssistant], Field(max_length=_MOST_BLOCKS, fail_fast=True)]


Message = Annotated[SystemMessage | UserMessage | AssistantMessage, Field(discriminator="role")]
Messages = Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
