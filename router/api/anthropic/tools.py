"""The tools of a request to /v1/messages, which have not the form that chat templates expect."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from common.errors import InvalidRequest
from router.api.request_body import Text
from router.api.tool_fields import MOST_TOOLS, FunctionName, Name, NamedTool, ToolFields


class ClientTool(BaseModel):
    """A tool that the client calls."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["custom"] = "custom"
    name: Name
    description: Text = ""
    input_schema: dict[str, Any]
    strict: bool = False
    cache_control: Any = None
    allowed_callers: list[Literal["direct"]] | None = None
    eager_input_streaming: bool | None = Field(None, description="inputs are streamed as they are written")


def _only_clients(tools: Any) -> Any:
    """Anthropic runs others, or has trained its models on them. Raises InvalidRequest."""
    for number, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            told = f"tools.{number}: {kind[:64]!r} is not supported: describe a tool that the client calls"
            raise InvalidRequest(told, "tools")
    return tools


ClientTools = Annotated[
    list[ClientTool], Field(max_length=MOST_TOOLS, fail_fast=True), BeforeValidator(_only_clients)
]


class ClientToolChoice(BaseModel):
    """Anthropic's tool_choice."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: Name | None = None
    disable_parallel_tool_use: bool = False


_CHOICES: dict[str, Literal["auto", "none", "required"]] = {
    "auto": "auto",
    "any": "required",
    "none": "none",
}


def tool_fields(tools: list[ClientTool], choice: ClientToolChoice) -> ToolFields:
    """The same as a chat has it. Raises InvalidRequest for a name too many or too few."""
    if (choice.name is not None) != (choice.type == "tool"):
        raise InvalidRequest("tool_choice.name belongs to type 'tool'", "tool_choice")
    functions = [{"type": "function", "function": _function(tool)} for tool in tools]
    chosen: Any = _CHOICES.get(choice.type)
    if choice.name is not None:
        chosen = NamedTool(function=FunctionName(name=choice.name))
    return ToolFields(
        tools=functions, tool_choice=chosen, parallel_tool_calls=not choice.disable_parallel_tool_use
    )


def _function(tool: ClientTool) -> dict[str, Any]:
    described = {"description": tool.description} if tool.description else {}
    strict = {"strict": True} if tool.strict else {}
    return {"name": tool.name, **described, "parameters": tool.input_schema, **strict}
