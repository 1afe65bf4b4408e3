"""Grammars that demand calls: outputs that they allow are drawn at random, and read by the parsers."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from common.errors import InvalidRequest
from router.text.output_formats import TOOL_PARSERS, OutputFormats
from router.text.output_grammars import CallsWanted
from router.text.output_parts import Said
from router.text.tokenization import Tokenization
from router.text.tool_formats import deepseek, gemma4, harmony, hermes, kimi, llama3, mistral
from router.text.tool_formats.syntax import CalledTool
from router.text.tool_formats.xml import GLM, MINIMAX, SEED
from tests.support.tokenizers import byte_level
from wire.grammars import LIMITS, grammar_problem, matcher_grammar
from wire.request import Grammar, GrammarKind

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": ["x", 'y "z"']}, "b": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [
    CalledTool("get_weather", SCHEMA, True),
    CalledTool("now", {"properties": {}, "maxProperties": 0}, True),
]
# The families' own names of tokens: special, and not.
SPECIAL = [*gemma4.MARKERS, *kimi.MARKERS, *mistral.MARKERS, *llama3.MARKERS, *harmony.MARKERS]
ADDED = [*hermes.MARKERS, *deepseek.MARKERS, *GLM.key, *GLM.value, *SEED.call, *MINIMAX.call]
ANSWER = Grammar(GrammarKind.REGEX, "yes|no")
WITH_SYNTAX = list({one: name for name, one in TOOL_PARSERS.items() if one.syntax is not None}.values())


@pytest.fixture(scope="module")
def tokenization(tmp_path_factory: pytest.TempPathFactory) -> Tokenization:
    path = byte_level(tmp_path_factory.mktemp("grammars"))
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    tokenizer.save(str(path / "tokenizer.json"))
    return Tokenization(path)


class Drawn:
    """A model that writes at random what a grammar allows, and ends when it may."""

    def __init__(self, tokenization: Tokenization) -> None:
        self._tokenization = tokenization
        self.tokens = tokenization.added_ids()
        self.end = self.tokens["<|im_end|>"]
        size = tokenization.vocab_size
        self._llguidance = LLTokenizer(tokenization.tokenizer.to_str(), n_vocab=size, eos_token=[self.end])

    def matcher(self, grammar: Grammar) -> LLMatcher:
        assert grammar_problem(grammar) == ""
        matcher = LLMatcher(self._llguidance, matcher_grammar(grammar), log_level=0, limits=LIMITS)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def text(self, grammar: Grammar, seed: int, most: int = 400) -> str | None:
        """None: it has not ended."""
        matcher, draw, tokens = self.matcher(grammar), random.Random(seed), []
        while not matcher.is_stopped() and len(tokens) < most:
            mask = matcher.compute_bitmask()
            allowed = [token for token in range(len(mask) * 8) if mask[token // 8] >> token % 8 & 1]
            special = [token for token in allowed if token in self.tokens.values()]
            token = draw.choice(special if special and draw.random() < 0.5 else allowed)
            matcher.consume_token(token)
            if token != self.end:
                tokens.append(token)
        return self._tokenization.decode(tokens) if matcher.is_stopped() else None

    def allows(self, grammar: Grammar, text: str) -> bool:
        matcher = self.matcher(grammar)
        tokens = self._tokenization.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.fixture(scope="module")
def drawn(tokenization: Tokenization) -> Drawn:
    return Drawn(tokenization)


def said(
    formats: OutputFormats,
    text: str,
    prompt_end: str = "",
    required: bool = True,
    tools: Sequence[CalledTool] = TOOLS,
) -> Said:
    parsing = formats.parsing(prompt_end, {tool.name: tool.schema for tool in tools}, required=required)
    assert parsing is not None
    parser, found = parsing.parser(1), Said()
    found.add(parser.feed(text) + parser.end())
    return found


def is_right(name: str, arguments: str) -> bool:
    given = json.loads(arguments)
    if name == "now":
        return bool(given == {})
    return (
        name == "get_weather"
        and given.pop("a") in ("x", 'y "z"')
        and given in ({}, {"b": True}, {"b": False})
    )


@pytest.mark.covering("invariants")
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("prompt_end", ["", "<think>\n", "</think>\n\n"])
@pytest.mark.parametrize("name", ["none", *WITH_SYNTAX])
def test_what_is_demanded_is_read(drawn: Drawn, name: str, prompt_end: str, several: bool) -> None:
    formats = OutputFormats("", drawn.tokens, (), name, "qwen3")
    lark = formats.grammar(prompt_end, CallsWanted(TOOLS, True, several), False)
    grammar = Grammar(GrammarKind.LARK, lark)
    counts = []
    for seed in range(30):
        if (text := drawn.text(grammar, seed)) is not None:
            found = said(formats, text, prompt_end)
            assert found.content == ""
            assert all(is_right(call.name, call.arguments) for call in found.calls)
            counts.append(len(found.calls))
    assert len(counts) > 5  # others still think, or call
    assert min(counts) > 0
    assert (max(counts) > 1) == several


@pytest.mark.parametrize("name", WITH_SYNTAX)
def test_text_may_end_with_calls(drawn: Drawn, name: str) -> None:
    formats = OutputFormats("", drawn.tokens, (), name, "none")
    grammar = Grammar(GrammarKind.LARK, formats.grammar("", CallsWanted(TOOLS, False, True), False))
    assert drawn.allows(grammar, "It rains.\n")
    assert drawn.allows(grammar, "")
    if name == "llama3":
        assert drawn.allows(grammar, '{"name": "now", "parameters": {}}')
        assert not drawn.allows(grammar, '{"name": "later", "parameters": {}}')
        return
    called = 0
    for seed in range(30):
        if (text := drawn.text(grammar, seed)) is not None:
            found = said(formats, text, required=False)
            assert all(is_right(call.name, call.arguments) for call in found.calls)
            called += bool(found.calls)
    assert called > 5


def test_content_matches_behind_reasoning(drawn: Drawn) -> None:
    formats = OutputFormats("", drawn.tokens, (), "hermes", "qwen3")
    may = Grammar(ANSWER.kind, ANSWER.text, formats.grammar("", None, True))
    for text in ("yes", "<think>Hm.\n</think>\n\nno", "<think></think>no"):
        assert drawn.allows(may, text)
    for text in ("Hm.</think>no", "<think>yes", "<think>Hm.</think>maybe", "maybe"):
        assert not drawn.allows(may, text)
    is_open = Grammar(ANSWER.kind, ANSWER.text, formats.grammar("<think>\n", None, True))
    assert drawn.allows(is_open, "Hm.</think>no")
    assert not drawn.allows(is_open, "no")
    goes_on = Grammar(ANSWER.kind, ANSWER.text, formats.grammar("Now", None, True, "<think>\nNow"))
    assert drawn.allows(goes_on, " then.\n</think>\n\nno")
    assert not drawn.allows(goes_on, "no")
    assert formats.grammar("</think>\n\n", None, True) == ""
    assert formats.grammar("It", None, True, "<think>\n</think>It") == ""


@pytest.mark.parametrize(
    "body",
    [
        ANSWER,
        Grammar(GrammarKind.LARK, 'start: x\nx: "yes" | "no"'),
        Grammar(GrammarKind.JSON_SCHEMA, '{"enum": ["yes"]}'),
    ],
)
def test_content_matches_or_there_are_calls(drawn: Drawn, body: Grammar) -> None:
    formats = OutputFormats("", drawn.tokens, (), "hermes", "none")
    around = formats.grammar("", CallsWanted(TOOLS, False, True), True)
    grammar = Grammar(body.kind, body.text, around)
    assert drawn.allows(grammar, '"yes"' if body.kind is GrammarKind.JSON_SCHEMA else "yes")
    assert drawn.allows(grammar, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert not drawn.allows(grammar, "text")


def test_tags_that_are_no_tokens_end_reasoning_too(drawn: Drawn) -> None:
    formats = OutputFormats("", {}, (), "hermes", "seed_oss")
    grammar = Grammar(ANSWER.kind, ANSWER.text, formats.grammar("<seed:think>", None, True))
    assert drawn.allows(grammar, "Hm.</seed:think>yes")
    assert not drawn.allows(grammar, "Hm.</seed:think>maybe")


def test_strict_calls_without_a_grammar_are_refused(drawn: Drawn) -> None:
    formats = OutputFormats("", drawn.tokens, (), "pythonic")
    with pytest.raises(InvalidRequest, match="strict"):
        formats.grammar("", CallsWanted(TOOLS, False, True), False)
    calls = CallsWanted([CalledTool("f", SCHEMA, False)], False, True)
    assert formats.grammar("", calls, False) == ""


def test_arguments_a_tag(drawn: Drawn) -> None:
    schema = {
        "properties": {
            "s": {"type": "string"},
            "n": {"$ref": "#/$defs/n"},
            "one": {"const": "x"},
        },
        "required": ["s"],
        "$defs": {"n": {"type": "integer"}},
    }
    calls = CallsWanted([CalledTool("f", schema, True, "tools.0"), CalledTool("g", {}, False)], True, False)
    names = ("qwen3_coder", "seed_oss", "minimax_m2", "glm45")
    formats = {name: OutputFormats("", drawn.tokens, (), name, "none") for name in names}
    grammars = {
        name: Grammar(GrammarKind.LARK, one.grammar("", calls, False)) for name, one in formats.items()
    }
    for name, texts in {
        "qwen3_coder": (
            "<tool_call>\n<function=f>\n<parameter=s>\na\nb\n</parameter>\n<parameter=n>\n12\n</parameter>\n"
            "</function>\n</tool_call>",
            "<tool_call>\n<function=g>\n<parameter=any>\nx\n</parameter>\n</function>\n</tool_call>",
        ),
        "seed_oss": (
            "<seed:tool_call>\n<function=f>\n<parameter=s>a\nb</parameter>\n<parameter=n>12</parameter>\n"
            "</function>\n</seed:tool_call>",
            "<seed:tool_call>\n<function=g>\n<parameter=any>x</parameter>\n</function>\n</seed:tool_call>",
        ),
        "minimax_m2": (
            '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">a\nb</parameter>\n'
            '<parameter name="n">12</parameter>\n</invoke>\n</minimax:tool_call>',
            '<minimax:tool_call>\n<invoke name="g">\n<parameter name="any">x</parameter>\n</invoke>\n'
            "</minimax:tool_call>",
        ),
        "glm45": (
            "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a\nb</arg_value>\n<arg_key>n</arg_key>\n"
            "<arg_value>12</arg_value>\n</tool_call>",
            "<tool_call>g\n<arg_key>any</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
        ),
    }.items():
        assert all(drawn.allows(grammars[name], text) for text in texts)
        assert not drawn.allows(grammars[name], texts[0].replace("12", "x"))
        assert not drawn.allows(
            grammars[name], texts[0].replace("=s>", "=t>").replace(">s<", ">t<").replace('"s"', '"t"')
        )
        arguments = [said(formats[name], text).calls[0].arguments for text in texts]
        assert [json.loads(one) for one in arguments][1] == {"any": "x"}
        both = texts[0] + "\n" + texts[1]
        if name == "minimax_m2":  # all calls between one pair of tags
            both = both.replace("</minimax:tool_call>\n<minimax:tool_call>\n", "")
        several = CallsWanted(calls.tools, True, True)
        grammar = Grammar(GrammarKind.LARK, formats[name].grammar("", several, False))
        assert drawn.allows(grammar, both)
        assert not drawn.allows(grammars[name], both)
        assert [call.name for call in said(formats[name], both).calls] == ["f", "g"]
    for strict in ({"properties": {"s": {"type": "string", "pattern": "a"}}}, {"anyOf": [schema]}):
        wanted = CallsWanted([CalledTool("f", strict, True, "tools.0")], True, False)
        with pytest.raises(InvalidRequest, match=r"tools\.0: '(pattern|anyOf)'"):
            formats["glm45"].grammar("", wanted, False)


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"enum": [1, 2]}, [1, 2]),
        ({"enum": [1, "a"]}, [1, "a"]),
        ({"const": "5"}, ["5"]),
        ({"type": ["string", "null"], "enum": ["a", "null", None]}, ["a", None]),
        ({"anyOf": [{"type": "string", "enum": ["a", "b"]}, {"type": "null"}]}, ["a", "b", None]),
        ({"oneOf": [{"const": 1}, {"const": "a"}]}, [1, "a"]),
        ({"allOf": [{"type": "boolean"}]}, [True, False]),
        ({"type": "string", "enum": ["a\n", "b"]}, ["a\n", "b"]),
    ],
)
def test_strict_arguments_a_tag_are_of_the_values_that_are_listed(
    drawn: Drawn, schema: dict[str, Any], values: list[Any]
) -> None:
    tools = [CalledTool("f", {"properties": {"a": schema}, "required": ["a"]}, True)]
    for name in ("qwen3_coder", "seed_oss", "minimax_m2", "glm45"):
        formats = OutputFormats("", drawn.tokens, (), name, "none")
        grammar = Grammar(GrammarKind.LARK, formats.grammar("", CallsWanted(tools, True, False), False))
        for seed in range(8):
            text = drawn.text(grammar, seed, most=100)
            assert text is not None
            (call,) = said(formats, text, tools=tools).calls
            assert json.loads(call.arguments)["a"] in values


def test_limits_of_texts_that_strict_arguments_a_tag_cannot_have_are_refused(drawn: Drawn) -> None:
    formats = OutputFormats("", drawn.tokens, (), "qwen3_coder", "none")
    text = {"type": "string"}
    for schema, word in (
        ({"anyOf": [{**text, "maxLength": 3}, {"type": "null"}]}, "maxLength"),
        ({"anyOf": [{**text, "enum": ["a"]}, {"type": "integer"}]}, "enum"),
        ({"anyOf": [text, {**text, "enum": ["a"]}]}, ""),
        ({"description": "any"}, ""),
    ):
        tool = CalledTool("f", {"properties": {"a": schema}}, True, "tools.0")
        wanted = CallsWanted([tool], True, False)
        if word:
            with pytest.raises(InvalidRequest, match=rf"tools\.0: '{word}'"):
                formats.grammar("", wanted, False)
        else:
            assert "value_text" in formats.grammar("", wanted, False)


def test_arguments_of_gemma(drawn: Drawn) -> None:
    inner = {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "y": {"type": "string"}, "z": {"type": "boolean"}},
        "required": ["y", "z"],
    }
    schema = {
        "type": "object",
        "properties": {
            "o": inner,
            "list": {"type": "array", "items": {"enum": ["a", 'b "c"', None]}},
            "n": {"anyOf": [{"type": "number", "minimum": 3}, {"type": "null"}]},
            "any": {"description": "of any type"},
        },
    }
    tools = [CalledTool("f", schema, True, "tools.0")]
    formats = OutputFormats("", drawn.tokens, (), "gemma4", "none")
    grammar = Grammar(GrammarKind.LARK, formats.grammar("", CallsWanted(tools, True, False), False))
    read = {
        "": {},
        'o:{y:<|"|>z<|"|>,z:true}': {"o": {"y": "z", "z": True}},
        'o:{x:1,y:<|"|><|"|>,z:false},list:[]': {"o": {"x": 1, "y": "", "z": False}, "list": []},
        'list:[<|"|>b "c"<|"|>,null],any:[{k:<|"|>v<|"|>}]': {"list": ['b "c"', None], "any": [{"k": "v"}]},
        "n:4.5": {"n": 4.5},
        "n:null,any:true": {"n": None, "any": True},
    }
    for written, want in read.items():
        text = f"<|tool_call>call:f{{{written}}}<tool_call|>"
        assert drawn.allows(grammar, text), text
        (call,) = said(formats, text, tools=tools).calls
        assert json.loads(call.arguments) == want
    for written in (
        "o:{x:1,z:true}",
        'o:{y:<|"|>z<|"|>}',
        'list:[<|"|>d<|"|>]',
        "n:2",
        "any:true,n:4",
        "z:1",
        "o:null",
        "n:4,",
    ):
        assert not drawn.allows(grammar, f"<|tool_call>call:f{{{written}}}<tool_call|>"), written


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "pattern"),
        ({"properties": {"a": {"type": "array", "minItems": 1}}}, "minItems"),
        ({"properties": {"a": {"$ref": "#/$defs/a"}}}, r"\$ref"),
        ({"properties": {"a": {}, "b": {}}, "maxProperties": 1}, "maxProperties"),
        ({"anyOf": [{"properties": {}}]}, "anyOf"),
        ({"type": "array"}, "type"),
        ({"properties": {"a": {"properties": {"b": {}}, "patternProperties": {}}}}, "patternProperties"),
    ],
)
def test_what_strict_arguments_of_gemma_cannot_follow_is_refused(
    drawn: Drawn, schema: dict[str, Any], keyword: str
) -> None:
    formats = OutputFormats("", drawn.tokens, (), "gemma4", "none")

    def grammar(follows: bool) -> str:
        tools = [CalledTool("f", schema, follows, "tools.0")]
        return formats.grammar("", CallsWanted(tools, True, False), False)

    with pytest.raises(InvalidRequest, match=rf"tools\.0: '{keyword}'"):
        grammar(True)
    assert drawn.matcher(Grammar(GrammarKind.LARK, grammar(False)))


def test_any_arguments_of_gemma_are_read(drawn: Drawn) -> None:
    """Of a schema that says nothing: whatever the grammar allows is JSON."""
    formats = OutputFormats("", drawn.tokens, (), "gemma4", "none")
    tools = [CalledTool("f", {}, False)]
    grammar = Grammar(GrammarKind.LARK, formats.grammar("", CallsWanted(tools, True, False), False))
    texts = [text for seed in range(40) if (text := drawn.text(grammar, seed, most=100)) is not None]
    assert len(texts) > 10
    for text in texts:
        (call,) = said(formats, text, tools=tools).calls
        assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("schema", [{"type": 5}, {"enum": 5}, {"anyOf": 5}, {"type": {"a": 1}}, 5])
def test_what_is_no_schema_is_no_failure(drawn: Drawn, schema: Any) -> None:
    formats = OutputFormats("", drawn.tokens, (), "qwen3_coder", "none")
    tools = [CalledTool("f", {"properties": {"a": schema}, "required": ["a"]}, False, "tools.0")]
    assert formats.grammar("", CallsWanted(tools, True, False), False)
    (call,) = said(formats, "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>", tools=tools).calls
    assert call.arguments == '{"a": 1}'
    tools = [CalledTool("f", {"properties": {"a": {}}, "required": True}, False, "tools.0")]
    with pytest.raises(InvalidRequest, match=r"tools\.0: 'required'"):
        formats.grammar("", CallsWanted(tools, True, False), False)


@pytest.mark.parametrize("name", ["none", *WITH_SYNTAX, "openai"])
def test_every_name_that_a_tool_may_have_is_read(drawn: Drawn, name: str) -> None:
    formats = OutputFormats("", drawn.tokens, (), name, "none" if name != "openai" else "auto")
    tools = [CalledTool("a_1.b:c/d-e\u00e9", {"properties": {}, "maxProperties": 0}, True)]
    grammar = Grammar(GrammarKind.LARK, formats.grammar("", CallsWanted(tools, True, False), False))
    texts = [text for seed in range(10) if (text := drawn.text(grammar, seed)) is not None]
    assert texts
    for text in texts:
        assert [call.name for call in said(formats, text, tools=tools).calls] == [tools[0].name]


def test_schemas_are_followed_as_far_as_they_say(drawn: Drawn) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for follows in (True, False):
        calls = CallsWanted([CalledTool("f", schema, follows)], True, False)
        lark = OutputFormats("", drawn.tokens, (), "hermes").grammar("", calls, False)
        assert bool(grammar_problem(Grammar(GrammarKind.LARK, lark))) == follows


def test_channels(drawn: Drawn) -> None:
    formats = OutputFormats("", drawn.tokens, (), "openai", "auto")
    required = Grammar(GrammarKind.LARK, formats.grammar("", CallsWanted(TOOLS, True, False), False))
    ended = 0
    for seed in range(30):
        if (text := drawn.text(required, seed)) is not None:
            (call,) = said(formats, text).calls
            assert is_right(call.name, call.arguments)
            ended += 1
    assert ended > 5
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    called = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    final = Grammar(ANSWER.kind, ANSWER.text, formats.grammar("", None, True))
    auto = Grammar(GrammarKind.LARK, formats.grammar("", CallsWanted(TOOLS, False, False), False))
    for before in ("", thought, thought * 2):
        assert drawn.allows(final, f"{before}<|channel|>final<|message|>yes")
        assert not drawn.allows(final, f"{before}<|channel|>final<|message|>maybe")
        assert drawn.allows(auto, f"{before}<|channel|>final<|message|>maybe")
        assert drawn.allows(auto, before + called)
        assert not drawn.allows(auto, f"{before}<|channel|>commentary to=functions.later")
