"""Which parser reads a model's output: chosen from its chat template, or named by the operator."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from common.errors import ConfigError
from router.text.output_grammars import CallsWanted, chat_grammar, thoughts
from router.text.output_parts import OutputParser
from router.text.output_source import Reading, ReadingParser, Source, rest
from router.text.reasoning import ReasoningStart, ReasoningTags
from router.text.reasoning import read as read_reasoning
from router.text.tool_formats import hermes
from router.text.tool_formats.calls import Calls
from router.text.tool_formats.syntax import CallSyntax, Markers

AUTO, NONE = "auto", "none"
PROMPT_END = 8
"""Tokens: the tag with which a template may end is among the last ones."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls. `signs`: texts that all stand in its chat templates."""

    read: Callable[[Source, Calls], Reading[None]]
    markers: tuple[str, ...]
    signs: tuple[str, ...]
    syntax: CallSyntax | None = None  # None: no grammar demands them


_HERMES = ToolFormat(hermes.read, hermes.MARKERS, (hermes.OPEN,), hermes.SYNTAX)
_TOOL_FORMATS = (_HERMES,)  # the first one whose signs a template has

TOOL_PARSERS: Mapping[str, ToolFormat] = MappingProxyType(
    {"hermes": _HERMES, "qwen": _HERMES, "qwen25": _HERMES}
)
"""By the names that vLLM and SGLang give them."""

_THINK = ReasoningTags("<think>", "</think>")
_THINK_ASSUMED = ReasoningTags("<think>", "</think>", assumed=True)
_MISTRAL_THINK = ReasoningTags("[THINK]", "[/THINK]")
_KIMI_THINK = ReasoningTags("◁think▷", "◁/think▷")
_SEED_THINK = ReasoningTags("<seed:think>", "</seed:think>")
_FAMILIES = (_THINK, _MISTRAL_THINK, _KIMI_THINK, _SEED_THINK)

REASONING_PARSERS: Mapping[str, ReasoningTags] = MappingProxyType(
    {
        **dict.fromkeys(("qwen3", "deepseek_v3", "deepseek-v3", "glm45", "holo2", "hunyuan"), _THINK),
        **dict.fromkeys(("deepseek_r1", "deepseek-r1", "qwen3-thinking"), _THINK_ASSUMED),
        **dict.fromkeys(("mistral", "magistral"), _MISTRAL_THINK),
        "kimi": _KIMI_THINK,
        "seed_oss": _SEED_THINK,
    }
)
"""By the names that vLLM and SGLang give them."""


def check_parsers(tool_call_parser: str, reasoning_parser: str) -> None:
    """Raises ConfigError for names that are unknown."""
    for option, name, known in (
        ("tool_call_parser", tool_call_parser, TOOL_PARSERS),
        ("reasoning_parser", reasoning_parser, REASONING_PARSERS),
    ):
        if name not in (AUTO, NONE) and name not in known:
            remedy = f"give one of {', '.join((AUTO, NONE, *known))}"
            raise ConfigError(option, f"{name!r} is unknown", remedy)


@dataclass(frozen=True, slots=True)
class Parsing:
    """How the outputs of one request are read."""

    reasoning: ReasoningTags | None
    start: ReasoningStart  # of reasoning
    tools: ToolFormat | None
    names: Container[str]  # of the request's tools
    kept: frozenset[int]  # special tokens that the parser needs in the text
    hidden: tuple[str, ...]  # their texts, which stay out of what is said

    def parser(self, room: int) -> OutputParser:
        """For one choice, by the number of its room."""
        source, tools = Source(), self.tools
        if tools is None:
            then = rest
        else:
            calls, read = Calls(room, self.names), tools.read

            def then(source: Source) -> Reading[None]:
                return read(source, calls)

        if self.reasoning is None:
            return ReadingParser(source, then(source), self.hidden)
        reading = read_reasoning(source, self.reasoning, self.start, then)
        return ReadingParser(source, reading, self.hidden)


class OutputFormats:
    """What a model's outputs may have beside content."""

    def __init__(
        self,
        templates: str,
        tokens: Mapping[str, int],
        special: Container[int],
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
    ) -> None:
        """`templates`: the text of its chat templates. `tokens`: its added tokens, some of which are
        special. A parser is one of those above by name, or AUTO or NONE. Raises ConfigError."""
        check_parsers(tool_parser, reasoning_parser)
        self.tools = TOOL_PARSERS.get(tool_parser)
        if tool_parser == AUTO:
            self.tools = next((one for one in _TOOL_FORMATS if _has(templates, one.signs)), None)
        self.reasoning = REASONING_PARSERS.get(reasoning_parser)
        if reasoning_parser == AUTO:
            self.reasoning = next((one for one in _FAMILIES if one.closing in templates), None)
        self._tokens = tokens
        self._special = special

    def parsing(
        self,
        prompt_end: str,
        names: Container[str] | None,
        with_reasoning: bool = True,
        shows_special: bool = False,
        required: bool = False,
    ) -> Parsing | None:
        """For a request; None if its outputs are all content.

        `prompt_end`: the text of the prompt's last PROMPT_END tokens. `names`: of its tools; None: it has
        none, or none is to be called. Without reasoning it is part of the content. `shows_special`: special
        tokens are part of the text. `required`: a grammar demands calls.
        """
        reasoning = self.reasoning if with_reasoning else None
        tools = self._format(required) if names is not None else None
        if reasoning is None and tools is None:
            return None
        markers = (*(tools.markers if tools else ()), *(reasoning.markers if reasoning else ()))
        kept = () if shows_special else tuple(one for one in markers if self._is_special(one))
        return Parsing(
            reasoning=reasoning,
            start=ReasoningStart.NEVER if reasoning is None else reasoning.start(prompt_end),
            tools=tools,
            names=names or (),
            kept=frozenset(self._tokens[one] for one in kept),
            hidden=kept,
        )

    def grammar(self, prompt_end: str, calls: CallsWanted | None, has_body: bool) -> str:
        """What an output matches, in Lark: reasoning and calls around what the content matches, if it has to
        (`has_body`); "": the output is the content. Calls that are required and cannot be demanded in the
        model's own form are written as Hermes writes them. Other calls are, then, not spoken of."""
        markers, tags = Markers(self._tokens), self.reasoning
        before = ("", "") if tags is None else thoughts(tags, tags.start(prompt_end), markers)
        tools = self._format(calls is not None and calls.required)
        if calls is None or tools is None or tools.syntax is None:
            return chat_grammar(before, None, markers, has_body) if before[0] and has_body else ""
        return chat_grammar(before, (calls, tools.syntax), markers, has_body)

    def _format(self, required: bool) -> ToolFormat | None:
        known = self.tools
        return _HERMES if required and (known is None or known.syntax is None) else known

    def _is_special(self, marker: str) -> bool:
        return self._tokens.get(marker) in self._special


def _has(templates: str, signs: tuple[str, ...]) -> bool:
    return all(sign in templates for sign in signs)
