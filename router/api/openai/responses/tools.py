"""The tools of a request to /v1/responses, which have not quite the form that they have in a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from common.errors import InvalidRequest
from router.api.request_body import Text
from router.api.tool_fields import (
    MOST_TOOLS,
    AllowedTools,
    AllowedToolsChoice,
    FunctionName,
    Name,
    NamedTool,
    ToolFields,
)


class FunctionTool(BaseModel):
    """A function of the client's."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None


def _only_functions(tools: Any) -> Any:
    """OpenAI runs others itself. Raises InvalidRequest, with the name of the tool."""
    for number, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            told = f"tools.{number}: {kind[:64]!r} is not supported: tools are the client's functions"
            raise InvalidRequest(told, "tools")
    return tools


FunctionTools = Annotated[
    list[FunctionTool], Field(max_length=MOST_TOOLS, fail_fast=True), BeforeValidator(_only_functions)
]


class NamedFunction(BaseModel):
    """One function by name."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    name: Name


class AllowedFunctions(BaseModel):
    """Some of the functions."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MOST_TOOLS, fail_fast=True)]


FunctionChoice = Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions


def tool_fields(tools: list[FunctionTool], choice: FunctionChoice, several: bool) -> ToolFields:
    """The same as a chat has it."""
    own = {"name", "description", "parameters", "strict"}
    functions = [
        {"type": "function", "function": tool.model_dump(exclude_none=True, include=own)} for tool in tools
    ]
    chosen: Any = choice
    if isinstance(choice, NamedFunction):
        chosen = _named(choice)
    elif isinstance(choice, AllowedFunctions):
        allowed = AllowedTools(mode=choice.mode, tools=[_named(one) for one in choice.tools])
        chosen = AllowedToolsChoice(type="allowed_tools", allowed_tools=allowed)
    return ToolFields(tools=functions, tool_choice=chosen, parallel_tool_calls=several)


def _named(one: NamedFunction) -> NamedTool:
    return NamedTool(function=FunctionName(name=one.name))
