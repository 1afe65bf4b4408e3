"""Which parser reads a model's output: chosen from its chat template, or named by the operator."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from common.errors import ConfigError, InvalidRequest
from router.text.output_grammars import CallsWanted, chat_grammar, harmony_grammar, thoughts
from router.text.output_parts import OutputParser
from router.text.output_source import Reading, ReadingParser, Source, rest
from router.text.reasoning import ReasoningStart, ReasoningTags
from router.text.reasoning import read as read_reasoning
from router.text.tool_formats import (
    deepseek,
    gemma4,
    gemma4_syntax,
    harmony,
    hermes,
    kimi,
    llama3,
    minimax_m3,
    mistral,
    pythonic,
    xml,
    xml_syntax,
)
from router.text.tool_formats.calls import Calls, Schemas
from router.text.tool_formats.syntax import CallSyntax, Markers

AUTO, NONE = "auto", "none"
PROMPT_END = 8
"""Tokens: the tag with which a template may end is among the last ones."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls. `signs`: texts that all stand in its chat templates. `short_ids`:
    its templates want ids of 9 characters. `end_thoughts`: with what calls begin before which some models
    forget to end their thoughts; elsewhere a thought may have a call in it that is none."""

    read: Callable[[Source, Calls], Reading[None]]
    markers: tuple[str, ...]
    signs: tuple[str, ...]
    syntax: CallSyntax | None = None  # None: no grammar demands them
    short_ids: bool = False
    end_thoughts: tuple[str, ...] = ()


_HERMES = ToolFormat(hermes.read, hermes.MARKERS, (hermes.OPEN,), hermes.SYNTAX)
_MISTRAL = ToolFormat(
    mistral.read, mistral.MARKERS, (mistral.OPEN, mistral.ARGUMENTS), mistral.SYNTAX, short_ids=True
)
_MISTRAL_LIST = ToolFormat(
    mistral.read, mistral.MARKERS, (mistral.OPEN,), mistral.LIST_SYNTAX, short_ids=True
)
_DEEPSEEK_V3 = ToolFormat(deepseek.read, deepseek.MARKERS, (deepseek.CALL, "```json"), deepseek.V3_SYNTAX)
_DEEPSEEK = ToolFormat(deepseek.read, deepseek.MARKERS, (deepseek.CALL,), deepseek.SYNTAX)
_DEEPSEEK_V4 = ToolFormat(
    partial(xml.read, xml.DEEPSEEK_V4), xml.DEEPSEEK_V4.markers, (xml.DEEPSEEK_V4.call[0],)
)
_DEEPSEEK_V32 = ToolFormat(partial(xml.read, xml.DEEPSEEK), xml.DEEPSEEK.markers, xml.DEEPSEEK.markers)
_KIMI = ToolFormat(kimi.read, kimi.MARKERS, (kimi.BEGIN,), kimi.SYNTAX, end_thoughts=(kimi.BEGIN,))
_GEMMA4 = ToolFormat(gemma4.read, gemma4.MARKERS, (gemma4.OPEN + gemma4.BEFORE_NAME,), gemma4_syntax.SYNTAX)
_LLAMA3 = ToolFormat(llama3.read, llama3.MARKERS, ('"parameters": dictionary',), llama3.SYNTAX)
_PYTHONIC = ToolFormat(pythonic.read, pythonic.MARKERS, ("[func_name1(",))
_LFM2 = ToolFormat(pythonic.read, pythonic.MARKERS, ("<|tool_call_start|>",))

_QWEN_CODER = ToolFormat(
    partial(xml.read, xml.QWEN), xml.QWEN.markers, ("<function=",), xml_syntax.QWEN_SYNTAX
)
_SEED = ToolFormat(partial(xml.read, xml.SEED), xml.SEED.markers, (xml.SEED.call[0],), xml_syntax.SEED_SYNTAX)
_MINIMAX = ToolFormat(
    partial(xml.read, xml.MINIMAX), xml.MINIMAX.markers, (xml.MINIMAX.call[0],), xml_syntax.MINIMAX_SYNTAX
)
_MINIMAX_M3 = ToolFormat(minimax_m3.read, minimax_m3.MARKERS, minimax_m3.MARKERS)
_GLM = ToolFormat(
    partial(xml.read, xml.GLM),
    xml.GLM.markers,
    ("<arg_key>",),
    xml_syntax.GLM_SYNTAX,
    end_thoughts=(xml.GLM.call[0],),
)

_TOOL_FORMATS = (
    _DEEPSEEK_V4, _DEEPSEEK_V32, _DEEPSEEK_V3, _DEEPSEEK, _KIMI, _MISTRAL, _MISTRAL_LIST, _LFM2, _PYTHONIC,
    _SEED, _MINIMAX, _MINIMAX_M3, _QWEN_CODER, _GLM, _GEMMA4, _LLAMA3, _HERMES,
)  # fmt: skip
"""In this order: a template's format is the first one whose signs it has."""

TOOL_PARSERS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        **dict.fromkeys(("hermes", "qwen", "qwen25"), _HERMES),
        **dict.fromkeys(("llama3_json", "llama4_json", "llama3"), _LLAMA3),
        "mistral": _MISTRAL,
        "mistral_list": _MISTRAL_LIST,
        **dict.fromkeys(("deepseek_v3", "deepseekv3"), _DEEPSEEK_V3),
        **dict.fromkeys(("deepseek_v31", "deepseekv31"), _DEEPSEEK),
        **dict.fromkeys(("deepseek_v32", "deepseekv32"), _DEEPSEEK_V32),
        **dict.fromkeys(("deepseek_v4", "deepseekv4"), _DEEPSEEK_V4),
        "gemma4": _GEMMA4,
        "kimi_k2": _KIMI,
        **dict.fromkeys(("qwen3_coder", "qwen3_xml"), _QWEN_CODER),
        "seed_oss": _SEED,
        **dict.fromkeys(("minimax_m2", "minimax-m2"), _MINIMAX),
        **dict.fromkeys(("minimax_m3", "minimax-m3"), _MINIMAX_M3),
        **dict.fromkeys(("glm45", "glm47", "glm"), _GLM),
        **dict.fromkeys(("pythonic", "llama4_pythonic", "lfm2"), _PYTHONIC),
    }
)
"""By the names that vLLM and SGLang give them."""

_THINK = ReasoningTags("<think>", "</think>")
_THINK_ASSUMED = ReasoningTags("<think>", "</think>", assumed=True)
_MISTRAL_THINK = ReasoningTags("[THINK]", "[/THINK]")
_KIMI_THINK = ReasoningTags("◁think▷", "◁/think▷")
_SEED_THINK = ReasoningTags("<seed:think>", "</seed:think>", budget="<seed:cot_budget_reflect>")
_GEMMA4_THINK = ReasoningTags("<|channel>", "<channel|>", label="thought")
_MINIMAX_THINK = ReasoningTags("<mm:think>", "</mm:think>")
_FAMILIES = (_THINK, _MINIMAX_THINK, _MISTRAL_THINK, _KIMI_THINK, _SEED_THINK, _GEMMA4_THINK)

REASONING_PARSERS: Mapping[str, ReasoningTags] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *("qwen3", "deepseek_v3", "deepseek-v3", "glm45", "holo2", "hunyuan", "kimi_k2"),
                *("minimax_m2", "minimax", "deepseek_v4", "deepseek-v4"),
            ),
            _THINK,
        ),
        **dict.fromkeys(("deepseek_r1", "deepseek-r1", "qwen3-thinking"), _THINK_ASSUMED),
        **dict.fromkeys(("mistral", "magistral"), _MISTRAL_THINK),
        "gemma4": _GEMMA4_THINK,
        "kimi": _KIMI_THINK,
        **dict.fromkeys(("minimax_m3", "minimax-m3"), _MINIMAX_THINK),
        "seed_oss": _SEED_THINK,
    }
)
"""By the names that vLLM and SGLang give them."""

HARMONY_PARSERS = ("openai", "gpt-oss", "gpt_oss", "openai_gptoss", "harmony")
"""Of calls and of reasoning, which belong together."""


def check_parsers(tool_call_parser: str, reasoning_parser: str) -> None:
    """Raises ConfigError for names that are unknown."""
    for option, name, known in (
        ("tool_call_parser", tool_call_parser, TOOL_PARSERS),
        ("reasoning_parser", reasoning_parser, REASONING_PARSERS),
    ):
        names = (AUTO, NONE, *known, *HARMONY_PARSERS)
        if name not in names:
            remedy = f"give one of {', '.join(names)}"
            raise ConfigError(option, f"{name!r} is unknown", remedy)


@dataclass(frozen=True, slots=True)
class Parsing:
    """How the outputs of one request are read."""

    reasoning: ReasoningTags | None
    start: ReasoningStart  # of reasoning
    tools: ToolFormat | None
    schemas: Schemas  # of what the request's tools take
    kept: frozenset[int]  # special tokens that the parser needs in the text
    hidden: tuple[str, ...]  # their texts, which stay out of what is said
    channels: tuple[bool, bool] | None = None  # Harmony's: whether calls are read, and reasoning
    unsaid_behind: frozenset[int] = frozenset()  # kept tokens: what follows, up to another, nobody is told

    def parser(self, room: int) -> OutputParser:
        """For one choice, by the number of its room."""
        source, tools = Source(), self.tools
        calls = Calls(room, self.schemas, tools is not None and tools.short_ids)
        if self.channels is not None:
            with_calls, with_reasoning = self.channels
            reading = harmony.read(source, calls if with_calls else None, with_reasoning)
            return ReadingParser(source, reading, self.hidden)

        def then(source: Source) -> Reading[None]:
            return rest(source) if tools is None else tools.read(source, calls)

        if self.reasoning is None:
            return ReadingParser(source, then(source), self.hidden)
        end_thoughts = () if tools is None else tools.end_thoughts
        reading = read_reasoning(source, self.reasoning, self.start, then, end_thoughts)
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
            self.tools = _format_of(templates)
        self.reasoning = REASONING_PARSERS.get(reasoning_parser)
        if reasoning_parser == AUTO:
            self.reasoning = next((one for one in _FAMILIES if one.closing in templates), None)
        named = {tool_parser, reasoning_parser} - {AUTO, NONE}
        self.channels = not named.isdisjoint(HARMONY_PARSERS) or (
            not named and _has(templates, (harmony.CHANNEL, harmony.MESSAGE))
        )
        self._without_calls = tool_parser == NONE
        self._without_reasoning = reasoning_parser == NONE
        self.markers = Markers(tokens)
        self._tokens = tokens
        self._special = special

    def added_id(self, text: str) -> int | None:
        """The added token with this text, if there is one."""
        return self._tokens.get(text)

    @property
    def thought_tags(self) -> ReasoningTags | None:
        """What thoughts begin and end with. Those in channels are messages of their own, with other ends."""
        return None if self.channels else self.reasoning

    def parsing(
        self,
        prompt_end: str,
        schemas: Schemas | None,
        with_reasoning: bool = True,
        shows_special: bool = False,
        required: bool = False,
        continued: str = "",
    ) -> Parsing | None:
        """For a request; None if its outputs are all content.

        `prompt_end`: the text of the prompt's last tokens: PROMPT_END ones and those of `continued`, the text
        of the message with which the outputs go on. `schemas`: of its tools; None: it has none, or none is to
        be called. Without reasoning it is part of the content. `shows_special`: special tokens are part of
        the text. `required`: a grammar demands calls.
        """
        if self.channels:
            with_calls = schemas is not None and not self._without_calls
            reads = with_calls, with_reasoning and not self._without_reasoning
            return self._parsing(None, ReasoningStart.NEVER, None, schemas, shows_special, reads)
        reasoning = self.reasoning if with_reasoning else None
        tools = self._format(required) if schemas is not None else None
        if reasoning is None and tools is None:
            return None
        start = ReasoningStart.NEVER if reasoning is None else reasoning.start(prompt_end, continued)
        return self._parsing(reasoning, start, tools, schemas, shows_special)

    def grammar(self, prompt_end: str, calls: CallsWanted | None, has_body: bool, continued: str = "") -> str:
        """What an output matches, in Lark: reasoning and calls around what the content matches, if it has to
        (`has_body`); "": the output is the content. Calls that are required and cannot be demanded in the
        model's own form are written as Hermes writes them. Raises InvalidRequest if they cannot be and are
        strict."""
        markers, tags = self.markers, self.reasoning
        if self.channels:
            return harmony_grammar(calls, markers, has_body)
        before = ("", "") if tags is None else thoughts(tags, tags.start(prompt_end, continued), markers)
        tools = self._format(calls is not None and calls.required)
        if tools is not None and tools.syntax is None and calls is not None and calls.are_strict:
            raise InvalidRequest("no grammar makes this model's calls strict: require them", "tools")
        if calls is None or tools is None or tools.syntax is None:
            return chat_grammar(before, None, markers, has_body) if before[0] and has_body else ""
        return chat_grammar(before, (calls, tools.syntax), markers, has_body)

    def _parsing(
        self,
        reasoning: ReasoningTags | None,
        start: ReasoningStart,
        tools: ToolFormat | None,
        schemas: Schemas | None,
        shows_special: bool,
        channels: tuple[bool, bool] | None = None,
    ) -> Parsing:
        markers = (*(tools.markers if tools else ()), *(reasoning.markers if reasoning else ()))
        if channels is not None:
            markers = harmony.MARKERS
        kept = () if shows_special else tuple(one for one in markers if self._is_special(one))
        tokens = frozenset(self._tokens[one] for one in kept)
        heads = frozenset(self._tokens[one] for one in kept if one in harmony.BEFORE_HEADS)
        return Parsing(reasoning, start, tools, schemas or {}, tokens, kept, channels, heads)

    def _format(self, required: bool) -> ToolFormat | None:
        known = self.tools
        return _HERMES if required and (known is None or known.syntax is None) else known

    def _is_special(self, marker: str) -> bool:
        return self._tokens.get(marker) in self._special


def _format_of(templates: str) -> ToolFormat | None:
    """The format that a model's templates show."""
    return next((one for one in _TOOL_FORMATS if _has(templates, one.signs)), None)


def _has(templates: str, signs: tuple[str, ...]) -> bool:
    return all(sign in templates for sign in signs)
