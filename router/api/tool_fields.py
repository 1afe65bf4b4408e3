"""What a chat says of its tools: which there are, and which of them may or must be called."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from common.errors import InvalidRequest
from router.text.grammars import Wanted
from router.text.output_grammars import CallsWanted
from router.text.tool_formats.calls import Schemas
from router.text.tool_formats.syntax import CalledTool

MOST_TOOLS = 1024
_LONGEST_NAME = 256  # characters
_NAME = re.compile(rf"[\w.:/-]{{1,{_LONGEST_NAME}}}")  # what every form of calls can have
_CONTENT_FORMATS = ("response_format", "text.format", "output_config")
"""What they say is of the content alone, if an answer has one."""
Name = Annotated[str, Field(min_length=1, max_length=_LONGEST_NAME)]
Tools = Annotated[list[dict[str, Any]], Field(max_length=MOST_TOOLS, fail_fast=True)]


class FunctionName(BaseModel):
    """A function by name."""

    model_config = ConfigDict(extra="forbid")

    name: Name


class NamedTool(BaseModel):
    """OpenAI's {"type": "function", "function": {"name": ...}}."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"] = "function"
    function: FunctionName


class AllowedTools(BaseModel):
    """Some of the tools."""

    model_config = ConfigDict(extra="forbid")

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MOST_TOOLS, fail_fast=True)]


class AllowedToolsChoice(BaseModel):
    """OpenAI's {"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["auto", "none", "required"] | NamedTool | AllowedToolsChoice


class ToolFields(BaseModel):
    """Tools, and how they are chosen."""

    tools: Tools | None = None
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = Field(True, description="false: an answer has one call at most")

    @property
    def are_required(self) -> bool:
        """Whether an answer has to have calls."""
        match self.tool_choice:
            case NamedTool():
                return True
            case AllowedToolsChoice(allowed_tools=allowed):
                return allowed.mode == "required"
            case choice:
                return choice == "required"

    def calls_wanted(self, tools: list[dict[str, Any]] | None, wanted: Wanted | None) -> CallsWanted | None:
        """What grammars say of calls; None: nothing. `tools` are those of `callable_tools`; `wanted`: what
        the content has to match. Raises InvalidRequest where an output cannot do both."""
        if wanted is not None and self.are_required and not wanted.param.startswith(_CONTENT_FORMATS):
            raise InvalidRequest(f"{wanted.param} and a demanded call exclude each other", wanted.param)
        called = [
            CalledTool(
                f["name"],
                f.get("parameters") or {},
                f.get("strict") is True,
                f"tools.{n}.function.parameters",
            )
            for n, f in enumerate(tool["function"] for tool in tools or ())
        ]
        if isinstance(self.tool_choice, NamedTool):
            named = [tool for tool in called if tool.name == self.tool_choice.function.name]
            return CallsWanted(named, required=True, several=False)
        if called and (self.are_required or wanted is not None or any(tool.follows for tool in called)):
            return CallsWanted(called, self.are_required, self.parallel_tool_calls)
        return None

    def callable_tools(self) -> list[dict[str, Any]] | None:
        """The tools that an answer may call; None: none. Raises InvalidRequest for tools that are no
        functions with names, and for a choice of tools that are not there."""
        tools, choice = self.tools or [], self.tool_choice
        names = [_name(tool, f"tools.{number}") for number, tool in enumerate(tools)]
        if choice == "none":
            return None
        if not tools and choice != "auto":
            raise InvalidRequest("there are no tools to choose from", "tool_choice")
        chosen = _chosen(choice)
        for name in chosen:
            if name not in names:
                raise InvalidRequest(f"there is no tool named {name!r}", "tool_choice")
        if isinstance(choice, AllowedToolsChoice):
            return [tool for tool, name in zip(tools, names, strict=True) if name in chosen]
        return tools or None


def tool_schemas(tools: list[dict[str, Any]]) -> Schemas:
    """What tools that were checked take."""
    functions = [tool["function"] for tool in tools]
    return {function["name"]: function.get("parameters") or {} for function in functions}


def _chosen(choice: ToolChoice) -> list[str]:
    match choice:
        case NamedTool():
            return [choice.function.name]
        case AllowedToolsChoice():
            return [one.function.name for one in choice.allowed_tools.tools]
        case _:
            return []


def _name(tool: dict[str, Any], place: str) -> str:
    if tool.get("type", "function") != "function":
        raise InvalidRequest(f"{place}.type: only functions are supported", "tools")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{place}.function: an object is needed", "tools")
    name = function.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        told = f"1 to {_LONGEST_NAME} letters, digits and characters of '_.:/-' are needed"
        raise InvalidRequest(f"{place}.function.name: {told}", "tools")
    if not isinstance(function.get("parameters") or {}, dict):
        raise InvalidRequest(f"{place}.function.parameters: a JSON schema is an object", "tools")
    return name
