"""What bodies say of a chat: /v1/chat/completions and /tokenize take the same."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from common.errors import InvalidRequest
from router.text.chat import Chat
from router.text.messages import with_parsed_arguments

MOST_MESSAGES = 8192
MOST_DOCUMENTS = 1024
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Messages = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]


class ChatReasoning(BaseModel):
    """The object in which OpenRouter's clients put an effort."""

    model_config = ConfigDict(extra="forbid")

    effort: ReasoningEffort


class ChatFields(BaseModel):
    """A chat but for its messages and tools."""

    add_generation_prompt: bool | None = Field(None, description="default: unless continue_final_message")
    continue_final_message: bool = Field(False, description="the answer goes on with the last message's text")
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    documents: list[dict[str, Any]] | None = Field(None, max_length=MOST_DOCUMENTS, fail_fast=True)
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="for templates that know it, or whether to think; others have no use for it"
    )
    reasoning: ChatReasoning | None = Field(None, description="its effort, unless reasoning_effort is given")

    def make_chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> Chat:
        """The chat, with lists of text parts joined. Raises InvalidRequest for other parts."""
        plain = [_plain_message(message, position) for position, message in enumerate(messages)]
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "an answer goes on with the last message, or begins a new one: not both with "
                "add_generation_prompt", "continue_final_message",
            )  # fmt: skip
        prompted = not self.continue_final_message and self.add_generation_prompt is not False
        return Chat(plain, tools, prompted, self._template_kwargs(), self.continue_final_message)

    def _template_kwargs(self) -> dict[str, Any]:
        """With what has fields of its own. An effort says whether to think, by vLLM's and SGLang's names."""
        own: dict[str, Any] = {}
        effort = self.reasoning_effort or (self.reasoning and self.reasoning.effort)
        if effort is not None:
            thinks = effort != "none"
            own = {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
        if self.documents is not None:
            own["documents"] = self.documents
        return {**own, **self.chat_template_kwargs}


def _plain_message(message: dict[str, Any], position: int) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(f"messages.{position}.role: a string is needed", "messages")
    message = with_parsed_arguments(message, f"messages.{position}")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    if not isinstance(content, list):
        raise InvalidRequest(f"messages.{position}.content: text or a list of parts is needed", "messages")
    texts = [_text(part, message["role"], f"messages.{position}.content") for part in content]
    return {**message, "content": "\n".join(texts)}


def _text(part: Any, role: str, place: str) -> str:
    """Of a part of a content. A refusal is a model's text, too. Raises InvalidRequest for other parts."""
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(kind) if kind == "text" or (kind == "refusal" and role == "assistant") else None
    if not isinstance(text, str):
        raise InvalidRequest(f"{place}: only text parts are supported", "messages")
    return text
