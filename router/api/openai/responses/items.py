"""The items of a conversation, as clients send them and get them back. Null counts as absent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from router.api.chat_fields import MOST_MESSAGES
from router.api.request_body import Label, Text

_MOST_PARTS = 8192
_UNFINISHED = ("in_progress", "incomplete")


class _Piece(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Item(_Piece):
    """`id` and `status` are the server's. They change nothing but what `is_unfinished` says."""

    id: Label | None = None
    status: Label | None = None


class InputText(_Piece):
    """A text of a user, a system or a tool."""

    type: Literal["input_text"]
    text: Text


class OutputText(_Piece):
    """A text of the model."""

    type: Literal["output_text"]
    text: Text
    annotations: Any = None
    logprobs: Any = None


class RefusalText(_Piece):
    """What a model said instead."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        """What it said."""
        return self.refusal


TextPart = Annotated[InputText | OutputText | RefusalText, Field(discriminator="type")]
TextParts = Annotated[list[TextPart], Field(max_length=_MOST_PARTS, fail_fast=True)]


class MessageItem(_Item):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | TextParts
    phase: Any = None


class FunctionCallItem(_Item):
    """A call that the model has made."""

    type: Literal["function_call"]
    call_id: Label
    name: Text  # a model writes names of any length
    arguments: Text
    caller: Any = None


class FunctionOutputItem(_Item):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: Label
    output: Text | TextParts
    name: Label | None = None
    caller: Any = None


class _Thought(_Piece):
    type: Literal["reasoning_text", "summary_text"]
    text: Text


class ReasoningItem(_Item):
    """What the model thought before it said what follows."""

    type: Literal["reasoning"]
    summary: list[_Thought] = Field(default_factory=list, max_length=_MOST_PARTS, fail_fast=True)
    content: list[_Thought] = Field(default_factory=list, max_length=_MOST_PARTS, fail_fast=True)
    encrypted_content: Any = None

    @property
    def text(self) -> str:
        """The thoughts themselves, or else their summary."""
        return "".join(thought.text for thought in self.content or self.summary)


class ItemReference(_Piece):
    """An item of a kept response, by its id."""

    type: Literal["item_reference"] = "item_reference"
    id: Label


def _without_nulls(value: Any) -> Any:
    """Clients send items back as their own models print them: with every field that an answer may have."""
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    return value


def _kind(item: Any) -> Any:
    """A message and a reference may leave out their types."""
    if not isinstance(item, dict):
        return None
    return item.get("type", "message" if "role" in item or "id" not in item else "item_reference")


_Message = Annotated[MessageItem, Tag("message")]
_Call = Annotated[FunctionCallItem, Tag("function_call")]
_Output = Annotated[FunctionOutputItem, Tag("function_call_output")]
_Reasoning = Annotated[ReasoningItem, Tag("reasoning")]
_Reference = Annotated[ItemReference, Tag("item_reference")]
Item = Annotated[
    _Message | _Call | _Output | _Reasoning, Discriminator(_kind), BeforeValidator(_without_nulls)
]
GivenItem = Annotated[
    _Message | _Call | _Output | _Reasoning | _Reference,
    Discriminator(_kind),
    BeforeValidator(_without_nulls),
]
GivenItems = Annotated[list[GivenItem], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]


def is_unfinished(item: Item) -> bool:
    """Whether it is a text of the model that the answer goes on with, if it is the last item."""
    return isinstance(item, MessageItem) and item.role == "assistant" and item.status in _UNFINISHED


def told_items(told: Iterable[dict[str, Any]]) -> list[Item]:
    """The items of an answer. They are not checked: bounds are for what clients send."""
    return [_told(item) for item in told]


def _told(item: dict[str, Any]) -> Item:
    match item["type"]:
        case "function_call":
            return FunctionCallItem.model_construct(**item)
        case "reasoning":
            thoughts = {
                field: [_Thought.model_construct(**thought) for thought in item.get(field, ())]
                for field in ("summary", "content")
            }
            return ReasoningItem.model_construct(**{**item, **thoughts})
        case _:
            content = [OutputText.model_construct(**part) for part in item["content"]]
            return MessageItem.model_construct(**{**item, "content": content})
