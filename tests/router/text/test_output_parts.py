"""Texts of models, and the parts that parsers find in them, however the texts are cut into pieces."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.errors import ConfigError
from router.api.event_json import encode_event
from router.text.chat import Chat
from router.text.json_scanner import JsonScanner
from router.text.messages import with_parsed_arguments
from router.text.output_formats import REASONING_PARSERS, TOOL_PARSERS, OutputFormats
from router.text.output_parts import CallArguments, CallStart, Content, Part, Reasoning, Said
from router.text.output_source import Source
from router.text.tool_formats import gemma4, minimax_m3, pythonic

SCHEMA = {
    "properties": {
        **{"s": {"type": "string"}, "n": {"type": ["number", "null"]}, "o": {"type": "object"}},
        "l": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "string"}}]},
        "p": {"properties": {"q": {"type": "string"}}, "additionalProperties": {"items": {"type": "number"}}},
    }
}
NAMES: dict[str, dict[str, Any]] = {"f": SCHEMA, "g": {}}
Found = tuple[str, str, list[tuple[str, str]]]  # reasoning, content, calls


def parts_of(
    pieces: list[str], tools: str = "none", reasoning: str = "none", prompt_end: str = ""
) -> list[Part]:
    if tools == "openai":
        reasoning = "openai"
    parsing = OutputFormats("", {}, (), tools, reasoning).parsing(prompt_end, NAMES)
    assert parsing is not None
    parser = parsing.parser(7)
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.end()
    return joined(parts)


def joined(parts: list[Part]) -> list[Part]:
    """With neighbours of one kind as one."""
    whole: list[Part] = []
    for part in parts:
        match whole[-1:], part:
            case [Reasoning(before)], Reasoning(text):
                whole[-1] = Reasoning(before + text)
            case [Content(before)], Content(text):
                whole[-1] = Content(before + text)
            case [CallArguments(index, before)], CallArguments(now, text) if index == now:
                whole[-1] = CallArguments(index, before + text)
            case _:
                whole.append(part)
    return whole


def found(parts: list[Part]) -> Found:
    said = Said()
    said.add(parts)
    return said.reasoning, said.content, [(call.name, call.arguments) for call in said.calls]


F1 = ("f", '{"a": 1}')
G = ("g", "{}")
HERMES_F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'

D_BEGIN, D_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
D_CALL, D_SEP, D_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
D_V3 = f'{D_CALL}function{D_SEP}f\n```json\n{{"a": 1}}\n```{D_CALL_END}'
DSML = "｜DSML｜"
K_BEGIN, K_END = "<|tool_calls_section_begin|>", "<|tool_call_end|>"
K_CALL, K_ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
Q_F = """<tool_call>
<function=f>
<parameter=s>
1
2
</parameter>
<parameter=n>null</parameter>
<parameter=o>
{"x": [1]}
</parameter>
<parameter=z>True</parameter>
</function>
</tool_call>
"""
S_F = """<seed:tool_call>
<function=f>
<parameter=s>1
2</parameter>
<parameter=n>null</parameter>
</function>
</seed:tool_call>"""
M_F = """<invoke name="f">
<parameter name="s">1
2</parameter>
<parameter name="n">null</parameter>
<parameter name="o">{"x": [1]}</parameter>
</invoke>
"""


def m3(*tags: str) -> str:
    """With MiniMax-M3's mark before each tag."""
    return "".join(minimax_m3.MARK + tag if tag.startswith("<") else tag for tag in tags)


M3_F = m3('<invoke name="f">', "<s>7", "</s>", "<n>42", "</n>", '<o>{"x": [1]}', "</o>", "</invoke>")
M_ARGUMENTS = '{"s": "1\\n2", "n": null, "o": {"x": [1]}}'
G4_F, G4_G = "<|tool_call>call:f{a:1}<tool_call|>", "<|tool_call>call:g{}<tool_call|>"
NEXT, ANALYSIS = "<|end|><|start|>assistant", "<|channel|>analysis<|message|>Hm."
TO_F = "<|channel|>commentary to=functions.f"

CASES: list[tuple[str, str, Found]] = [
    ("hermes", "Hello", ("", "Hello", [])),
    ("hermes", "", ("", "", [])),
    ("hermes", " \n", ("", " \n", [])),
    ("hermes", HERMES_F, ("", "", [F1])),
    ("hermes", f"Well.\n\n{HERMES_F}\n{HERMES_F}\n", ("", "Well.", [F1, F1])),
    ("hermes", f"{HERMES_F}\nthen", ("", "then", [F1])),
    ("hermes", HERMES_F.removesuffix("\n</tool_call>"), ("", "", [F1])),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', ("", "", [F1])),
    ("hermes", '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', ("", "", [F1])),
    ("hermes", '<tool_call>{"name": "g"}</tool_call>', ("", "", [G])),
    ("hermes", '<tool_call>{"name": "g", "arguments": null, "id": 3}</tool_call>', ("", "", [G])),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", "", [F1])),
    ("hermes", '<tool_call>{"name":"g"}\n{"name":"g"}</tool_call>', ("", "", [G, G])),
    ("hermes", '<tool_call>{"name": "unknown"}</tool_call>', ("", "", [("unknown", "{}")])),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "x\n\ty"}}</tool_call>',
        ("", "", [("f", '{"a": "x\\u000a\\u0009y"}')]),
    ),
    # Llama 3's.
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', ("", "", [F1])),
    ("llama3_json", '\n{"type": "function", "name": "f", "parameters": {"a": 1}}', ("", "", [F1])),
    (
        "llama3_json",
        '{"name": "g"}; {"name": "g", "parameters": {}}\n{"name": "f", "arguments": {"a": 1}}',
        ("", "", [G, G, F1]),
    ),
    ("llama3_json", '<|python_tag|>{"name": "other", "parameters": {}}', ("", "", [("other", "{}")])),
    ("llama3_json", 'So:\n<|python_tag|>{"name": "g"}', ("", "So:", [G])),
    # Mistral's.
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]', ("", "", [F1, G])),
    ("mistral", 'Well. [TOOL_CALLS][{"name": "g"}]</s>', ("", "Well.</s>", [G])),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}', ("", "", [F1, G])),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', ("", "", [F1])),
    # DeepSeek's.
    (
        "deepseek_v31",
        f"Hm.{D_BEGIN}{D_CALL}f{D_SEP}{F1[1]}{D_CALL_END}{D_CALL}g{D_SEP}{{}}{D_CALL_END}{D_END}",
        ("", "Hm.", [F1, G]),
    ),
    ("deepseek_v3", f"{D_BEGIN}{D_V3}\n{D_V3}{D_END}", ("", "", [F1, F1])),
    ("deepseek_v3", f"{D_CALL}function{D_SEP}{F1[1]}{D_CALL_END}", ("", "", [("function", F1[1])])),
    # DeepSeek-V3.2's.
    (
        "deepseek_v32",
        f'Hm.\n\n<{DSML}function_calls>\n<{DSML}invoke name="f">\n'
        f'<{DSML}parameter name="a" string="false">1</{DSML}parameter>\n</{DSML}invoke>\n'
        f'<{DSML}invoke name="g">\n</{DSML}invoke>\n</{DSML}function_calls>',
        ("", "Hm.", [F1, G]),
    ),
    (
        "deepseek_v32",
        f'<{DSML}invoke name="f"><{DSML}parameter name="a" string="true">007</{DSML}parameter>'
        f'<{DSML}parameter name="b" string="false">[{{"c": "d"}}]</{DSML}parameter>'
        f'<{DSML}parameter name="d" string="false">x</{DSML}parameter>'
        f'<{DSML}parameter name="e">2</{DSML}parameter></{DSML}invoke>',
        ("", "", [("f", '{"a": "007", "b": [{"c": "d"}], "d": "x", "e": 2}')]),
    ),
    (
        "deepseek_v32",
        f'<{DSML}invoke name="f"><{DSML}parameter name="s" string="false">7</{DSML}parameter>'
        f'<{DSML}parameter name="n" string="true">42</{DSML}parameter>'
        f'<{DSML}parameter name="o" string="true">{{"x": [1]}}</{DSML}parameter></{DSML}invoke>',
        ("", "", [("f", '{"s": "7", "n": 42, "o": {"x": [1]}}')]),
    ),
    # DeepSeek-V4's.
    (
        "deepseek_v4",
        f'Hm.\n\n<{DSML}tool_calls>\n<{DSML}invoke name="f">\n'
        f'<{DSML}parameter name="a" string="false">1</{DSML}parameter>\n</{DSML}invoke>\n'
        f'<{DSML}invoke name="g">\n</{DSML}invoke>\n</{DSML}tool_calls>',
        ("", "Hm.", [F1, G]),
    ),
    # Kimi K2's.
    (
        "kimi_k2",
        f"Hm.{K_BEGIN}{K_CALL}functions.f:0{K_ARGUMENTS}{F1[1]}{K_END}"
        f"{K_CALL}functions.g:1{K_ARGUMENTS}{{}}{K_END}<|tool_calls_section_end|> ",
        ("", "Hm.", [F1, G]),
    ),
    ("kimi_k2", f"{K_CALL} f {K_ARGUMENTS} {F1[1]}\nthen", ("", "then", [F1])),
    (
        "kimi_k2",
        f"a {K_BEGIN}{K_CALL}functions.f:5{K_ARGUMENTS}{F1[1]}{K_END}<|tool_calls_section_end|> b "
        f"{K_BEGIN}{K_CALL}functions.g:6{K_ARGUMENTS}{{}}{K_END}<|tool_calls_section_end|> c",
        ("", "abc", [F1, G]),
    ),
    ("kimi_k2", f"{K_CALL}functions.a.b:c:12{K_ARGUMENTS}{{}}", ("", "", [("a.b:c", "{}")])),
    ("kimi_k2", f"{K_BEGIN} no", ("", f"{K_BEGIN} no", [])),
    ("kimi_k2", f"{K_CALL}functions.f:0{K_ARGUMENTS}[]", ("", f"{K_CALL}functions.f:0{K_ARGUMENTS}[]", [])),
    ("kimi_k2", f"{K_CALL}functions.f:0", ("", f"{K_CALL}functions.f:0", [])),
    (
        "kimi_k2",
        f'a{K_CALL}0{K_ARGUMENTS} {{"n": 1, "x": 2}}{K_END}b',
        ("", "ab", [("f", '{"n": 1, "x": 2}')]),
    ),
    ("kimi_k2", f'{K_CALL}0{K_ARGUMENTS}{{"x": 2}}', ("", f'{K_CALL}0{K_ARGUMENTS}{{"x": 2}}', [])),
    ("kimi_k2", f'{K_CALL}0{K_ARGUMENTS}{{"n": 2', ("", f'{K_CALL}0{K_ARGUMENTS}{{"n": 2', [])),
    ("kimi_k2", f"{K_CALL}0{K_ARGUMENTS}[1]", ("", f"{K_CALL}0{K_ARGUMENTS}[1]", [])),
    # Gemma 4's.
    ("gemma4", f"Hm. {G4_F}{G4_G}\nSo.", ("", "Hm.So.", [F1, G])),
    ("gemma4", "<|tool_call>\ncall:g {\n}", ("", "", [G])),
    (
        "gemma4",
        '<|tool_call>call:f{s:<|"|>a "b"\n<|<tool_call|>}é <|"|>,t:<|"|><|"|>,n:null,x:-1.5e3 , y: True}',
        (
            "",
            "",
            [("f", '{"s": "a \\"b\\"\\n<|<tool_call|>}é ", "t": "", "n": null, "x": -1.5e3, "y": true}')],
        ),
    ),
    (
        "gemma4",
        '<|tool_call>call:f{o:{a:[1,<|"|>x<|"|>,[],{}],<|"|>b c<|"|>:false,},s:New York}<tool_call|>',
        ("", "", [("f", '{"o": {"a": [1, "x", [], {}], "b c": false}, "s": "New York"}')]),
    ),
    (
        "gemma4",
        "<|tool_call>:f{s:12, n:12,o:{s:12},a:,x:108.}<tool_call|>",
        ("", "", [("f", '{"s": "12", "n": 12, "o": {"s": 12}, "a": "", "x": "108."}')]),
    ),
    ("gemma4", "<|tool_call>call:a_b.c:d/e-f{n:NaN}", ("", "", [("a_b.c:d/e-f", '{"n": "NaN"}')])),
    # In Python.
    ("pythonic", "[f(a=1), g()]", ("", "", [F1, G])),
    ("pythonic", " [ f(a = 1) ]\n", ("", "", [F1])),
    ("pythonic", """[f(a="it's ]")]""", ("", "", [("f", '{"a": "it\'s ]"}')])),
    (
        "pythonic",
        "[g.h(a={'x': [1.5, \"]\"], 'y': None}, b=-1, c=true)]",
        ("", "[g.h(a={'x': [1.5, \"]\"], 'y': None}, b=-1, c=true)]", []),
    ),
    (
        "pythonic",
        "<|python_start|>[g.h(a={'x': [1.5, \"]\"]}, b=-1, c=true)]<|python_end|>",
        ("", "", [("g.h", '{"a": {"x": [1.5, "]"]}, "b": -1, "c": true}')]),
    ),
    (
        "pythonic",
        r'[f(a="\ud83d\ude00 é \ud83d", b="\U0001f600", c="\ude00")]',
        ("", "", [("f", '{"a": "\U0001f600 é \ufffd", "b": "\U0001f600", "c": "\ufffd"}')]),
    ),
    ("lfm2", "I see. <|tool_call_start|>[f(a=1)]<|tool_call_end|> Good.", ("", "I see.Good.", [F1])),
    # An argument a tag.
    ("qwen3_coder", Q_F, ("", "", [("f", '{"s": "1\\n2", "n": null, "o": {"x": [1]}, "z": true}')])),
    ("qwen3_coder", "Hm.\n<function=g>\n</function></tool_call>", ("", "Hm.", [G])),
    ("qwen3_coder", "<tool_call><function=g></function></tool_call>" * 2, ("", "", [G, G])),
    ("seed_oss", f"Hm.\n{S_F}\n{S_F}\n", ("", "Hm.", [("f", '{"s": "1\\n2", "n": null}')] * 2)),
    ("seed_oss", "<function=g>\n</function>\n</seed:tool_call>", ("", "", [G])),
    (
        "minimax_m2",
        f"Hm.\n<minimax:tool_call>\n{M_F}{M_F}</minimax:tool_call>\nSo.",
        ("", "Hm.So.", [("f", M_ARGUMENTS)] * 2),
    ),
    ("minimax_m2", '<minimax:tool_call><invoke name="g"></invoke></minimax:tool_call>', ("", "", [G])),
    ("minimax_m2", f"{M_F}", ("", "", [("f", M_ARGUMENTS)])),
    (
        "minimax_m3",
        "Hm.\n"
        + m3("<tool_call>", "\n", M3_F, "\n", '<invoke name="g">', "</invoke>", "\n", "</tool_call>")
        + "\nSo.",
        ("", "Hm.So.", [("f", '{"s": "7", "n": 42, "o": {"x": [1]}}'), G]),
    ),
    ("minimax_m3", m3('<invoke name="g">', "\n", "</invoke>"), ("", "", [G])),
    *(
        ("minimax_m3", m3('<invoke name="f">', *tags, "</invoke>"), ("", "", [("f", said)]))
        for tags, said in (
            (["<s> 1 ", "</s>", "\n", "<a>é", "</a>"], '{"s": " 1 ", "a": "é"}'),
            (["<s>if a <b> and</c>\n", "</s>"], '{"s": "if a <b> and</c>\\n"}'),
            (["<n>null", "</n>", "<o>", "\n", "</o>"], '{"n": null, "o": {}}'),
            (["<o>", "\n", "<k>1", "</k>", "\n", "<l>x", "</l>", "</o>"], '{"o": {"k": 1, "l": "x"}}'),
            (["<a>1", "</a>", "<n>2", "</n>", "<a>x", "</a>"], '{"a": [1, "x"], "n": 2}'),
            (["<a>", "<item>1", "</item>", "<item>x", "</item>", "</a>"], '{"a": [1, "x"]}'),
            (["<o>", "<item>1", "</item>", "</o>"], '{"o": {"item": 1}}'),
            (["<l>", "<e>1", "</e>", "</l>"], '{"l": ["1"]}'),
            (["<l>", "</l>", "<m>", "</m>"], '{"l": [], "m": ""}'),
            (["<l>[1]", "</l>"], '{"l": [1]}'),
            (["<l>1", "</l>", "<l>2", "</l>"], '{"l": ["1", "2"]}'),
            (["<p>", "<q>1", "</q>", "<r>", "<e>1", "</e>", "</r>", "</p>"], '{"p": {"q": "1", "r": [1]}}'),
        )
    ),
    ("glm45", "Hm. <tool_call>g</tool_call>\n<tool_call>g\n</tool_call>", ("", "Hm.", [G, G])),
    (
        "glm45",
        "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>1</arg_value>"
        "<arg_key>a</arg_key><arg_value>é</arg_value>\n</tool_call>",
        ("", "", [("f", '{"s": "1", "a": "é"}')]),
    ),
    (
        "glm45",
        "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>\nx = 1\n</arg_value>\n"
        "<arg_key>n</arg_key>\n<arg_value> 1\n</arg_value>\n</tool_call>",
        ("", "", [("f", '{"s": "\\nx = 1\\n", "n": 1}')]),
    ),
    # Harmony's.
    ("openai", "<|channel|>final<|message|>Yes.", ("", "Yes.", [])),
    (
        "openai",
        f"<|channel|>analysis<|message|>Hm.{NEXT}<|channel|>final<|message|>Yes.",
        ("Hm.", "Yes.", []),
    ),
    (
        "openai",
        f"{ANALYSIS}{NEXT}{TO_F} <|constrain|>json<|message|>{F1[1]}<|call|>",
        ("Hm.", "", [F1]),
    ),
    (
        "openai",
        f"<|channel|>commentary<|message|>I look.{NEXT} to=functions.f<|channel|>json<|message|>{F1[1]}",
        ("", "I look.", [F1]),
    ),
    ("openai", f" to=functions.f<|channel|>commentary json<|message|>{F1[1]}<|call|>", ("", "", [F1])),
    ("openai", "to=functions.g<|channel|>commentary <|constrain|>json<|message|>{}<|call|>", ("", "", [G])),
    ("openai", " to=functions", ("", " to=functions", [])),
    ("openai", " to=you", ("", " to=you", [])),
    ("openai", "<|channel|>commentary to=functions.f<|message|>nothing<|call|>", ("", "nothing", [])),
    ("openai", "<|channel|>anal", ("", "", [])),
    ("openai", "Text", ("", "Text", [])),
    # No calls.
    *(
        (tools, text, ("", text, []))
        for tools, text in (
            ("llama3_json", '{"name": "unknown", "parameters": {}}'),
            ("llama3_json", ' {"answer": 42}'),
            ("llama3_json", "{ x"),
            ("llama3_json", '<|python_tag|>search.call(query="x")'),
            ("mistral", "[TOOL_CALLS] nothing"),
            ("mistral", '[TOOL_CALLS] [{"name": "f"'),
            ("mistral", "[TOOL_CALLS]f[ARGS]{oops}"),
            ("deepseek_v31", f"{D_BEGIN}oops"),
            ("deepseek_v31", f"{D_BEGIN}{D_CALL}f{D_SEP}oops{D_CALL_END}"),
            ("deepseek_v31", f"{D_CALL}{'x' * 300}{D_SEP}{{}}"),
            ("deepseek_v3", f"{D_CALL}function{D_SEP}f\n```json\n[1]\n```"),
            ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1"),
            ("qwen3_coder", "<tool_call>\n<functions"),
            ("qwen3_coder", "<function=f oops>"),
            ("qwen3_coder", "<function=f>oops</function>"),
            ("seed_oss", "<seed:tool_call>\nf</seed:tool_call>"),
            ("minimax_m2", "<minimax:tool_call>\nf</minimax:tool_call>"),
            ("minimax_m2", "<minimax:tool_call>\n<invoke name=f>"),
            ("minimax_m2", '<invoke name="f">\n<parameter name="a">1'),
            ("minimax_m3", m3("<tool_call>", "\nf", "</tool_call>")),
            ("minimax_m3", m3("<invoke name='f'>")),
            ("minimax_m3", m3('<invoke name="f">', "<a>1", "</b>", "</invoke>")),
            ("minimax_m3", m3('<invoke name="f">', "oops", "</invoke>")),
            ("minimax_m3", m3('<invoke name="f">', "<a>x", "<b>1", "</b>", "</a>", "</invoke>")),
            ("minimax_m3", m3('<invoke name="f">', "<a>1", "</a>")),
            ("minimax_m3", m3('<invoke name="f">', "<>1", "</>", "</invoke>")),
            ("minimax_m3", m3('<invoke name="f">', *["<a>"] * 64, *["</a>"] * 64, "</invoke>")),
            (
                "minimax_m3",
                m3('<invoke name="f">', *["<a>"] * 40, "[" * 30 + "]" * 30, *["</a>"] * 40, "</invoke>"),
            ),
            ("glm45", "<tool_call>\n</tool_call>"),
            ("glm45", "<tool_call>f\n<arg_key>a</arg_key>oops"),
            ("gemma4", "<|tool_call>f{}"),
            ("gemma4", "<|tool_call>call:f oops"),
            ("gemma4", "<|tool_call>call:f{oops}<tool_call|>"),
            ("gemma4", "<|tool_call>call:f{,}"),
            ("gemma4", "<|tool_call>call:f{a:1<tool_call|>so"),
            ("gemma4", "<|tool_call>call:f{a:[1}"),
            ("gemma4", '<|tool_call>call:f{a:<|"|>x} and <|'),
            ("gemma4", "<|tool_call>call:f{a:" + "x" * 5000 + "}"),
            ("gemma4", '<|tool_call>call:f{a:<|"|>x<|"|>'),
            ("pythonic", "[1] says"),
            ("pythonic", "[f(1)]"),
            ("pythonic", "[f(a=b)]"),
            ("pythonic", "[f(**a)]"),
            ("pythonic", "[f(a={1, 2})]"),
            ("pythonic", "[f(a=1e999)]"),
            ("pythonic", "[f(a=" + "[" * 300 + "]" * 300 + ")]"),
            ("pythonic", "[unknown()]"),
            ("pythonic", "[f(a=" + "-" * 60_000 + "1)]"),
            ("pythonic", "[f(a=" + "1+" * 30_000 + "1)]"),
            ("pythonic", "[f" + ".f" * 30_000 + "()]"),
            ("pythonic", "[f(a='" + "x" * 70_000 + "')]"),
            ("pythonic", " " * 100 + "[f()]"),
            ("llama3_json", "\n" * 100 + '{"name": "f"}'),
            ("mistral", "[TOOL_CALLS]" + "f" * 300 + "[ARGS]{}"),
            ("hermes", "so" + " " * 200),
            ("pythonic", "[f(a='\\"),
            ("pythonic", "  [f"),
            ("pythonic", "<|python_start|>f()<|python_end|>"),
        )
    ),
    *(
        ("hermes", text, ("", text, []))
        for text in (
            "a <tool_cal",
            "<tool_call>nothing</tool_call>",
            "so <tool_call>",
            'x\n<tool_call>{"name": 3, "arguments": {}}</tool_call>',
            "<tool_call>{}</tool_call>",
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            r'<tool_call>{"name": "f\ud83d", "arguments": {}}</tool_call>',
            r'<tool_call>{"name": "f", "arguments": "{\"a\": \"\ud83d\"}"}</tool_call>',
            '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>',
            '<tool_call>{"name": "f", "arguments": {"a": 1}',
            '<tool_call>{"name": "f", "arguments": {"a": tru}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>',
            '<tool_call>{"name": "f" "arguments": {}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": {"a": {"b',
            '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 70 + "]" * 70 + "}}</tool_call>",
            '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 100,
        )
    ),
]


@pytest.mark.parametrize(("tools", "text", "want"), CASES)
def test_calls_and_what_is_none(tools: str, text: str, want: Found) -> None:
    got = found(parts_of([text], tools))
    assert got == want
    encode_event(got)


@pytest.mark.parametrize(("tools", "text", "want"), [case for case in CASES if len(case[1]) < 2000])
def test_however_a_text_is_cut(tools: str, text: str, want: Found) -> None:
    assert parts_of(list(text), tools) == parts_of([text], tools)
    reasoning = "openai" if tools == "openai" else "none"
    parsing = OutputFormats("", {}, (), tools, reasoning).parsing("", NAMES)
    assert parsing is not None
    char_by_char = parsing.parser(7)
    said: list[Part] = []
    for end in range(len(text)):  # a stream that is resumed anywhere has said the same
        said += char_by_char.feed(text[end])
        assert joined(said) == joined(parsing.parser(7).feed(text[: end + 1]))


@pytest.mark.parametrize(
    ("tools", "text", "want"),
    [case for case in CASES if case[0] != "openai" and not case[1].startswith("\n\n")],
)
def test_all_this_behind_thoughts(tools: str, text: str, want: Found) -> None:
    """Line ends behind them, of which there is no content."""
    thoughts, (_, content, calls) = "<think>\nHm.\n</think>\n\n", want
    want = "Hm.", content.lstrip("\n"), calls
    if len(text) < 2000:
        assert found(parts_of([*thoughts, *text], tools, "qwen3")) == want
    assert found(parts_of([thoughts + text], tools, "qwen3")) == want


DEEP: dict[str, tuple[str, int]] = {  # how a call is written, and the deepest lists that it tells as such
    "hermes": ('<tool_call>{"name": "f", "arguments": {"a": %s}}</tool_call>', 63),
    "qwen": ('<tool_call>{"arguments": "{\\"a\\": %s}", "name": "f"}</tool_call>', 63),
    "llama3_json": ('{"name": "f", "parameters": {"a": %s}}', 63),
    "mistral": ('[TOOL_CALLS]f[ARGS]{"a": %s}', 63),
    "gemma4": ("<|tool_call>call:f{a:%s}<tool_call|>", 63),
    "deepseek_v31": (f'{D_BEGIN}{D_CALL}f{D_SEP}{{"a": %s}}{D_CALL_END}{D_END}', 63),
    "pythonic": ("[f(a=%s)]", 63),
    "qwen3_coder": ("<function=f>\n<parameter=a>%s</parameter>\n</function>", 64),
    "glm45": ("<tool_call>f<arg_key>a</arg_key><arg_value>%s</arg_value></tool_call>", 64),
    "openai": ('<|channel|>commentary to=functions.f<|message|>{"a": %s}<|call|>', 63),
}


@pytest.mark.parametrize("tools", DEEP)
def test_the_deepest_call_that_is_told_can_be_given_back(tools: str) -> None:
    written, deepest = DEEP[tools]
    for levels in (deepest, deepest + 1, 400):
        lists = "[" * levels + "]" * levels
        calls = [
            call for call in found(parts_of([written % lists], tools))[2] if call[1] == f'{{"a": {lists}}}'
        ]
        assert len(calls) == (levels == deepest)
        for name, arguments in calls:
            call = {"id": "c", "function": {"name": name, "arguments": arguments}}
            Chat([with_parsed_arguments({"role": "assistant", "tool_calls": [call]}, "messages.0")])


@pytest.mark.parametrize(
    "opening", ["<|python_start|>[f(", "<|python_start|>[f(a='", '<|python_start|>[f(a=\\"']
)
def test_lists_that_never_end_are_not_read_to_the_end_of_the_text_each(opening: str) -> None:
    executed = [lines_of(opening * count, pythonic._size) for count in (100, 800)]
    assert 400 < executed[1] < 16 * executed[0]  # 64 times as many if each is read to the end of the text


def lines_of(text: str, function: Callable[..., Any]) -> int:
    """Lines of a function that are executed while a text is read that is all content."""
    executed = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal executed
        executed += event == "line"
        return trace if frame.f_code is function.__code__ else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        read = found(parts_of([text], "pythonic"))
    finally:
        sys.settrace(before)
    assert read == ("", text, [])
    return executed


@pytest.mark.parametrize(
    ("tools", "marker"), [("openai", "<|end|>"), ("openai", "<|channel|>"), ("qwen3_coder", "<function=f>")]
)
def test_a_long_text_of_markers_is_read_at_once_as_while_it_comes(
    tools: str, marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of it at a time: with each marker all that was not taken is copied and searched."""
    lengths: list[int] = []
    take = Source.take

    def noted(source: Source, count: int) -> str:
        lengths.append(len(source.text))
        return take(source, count)

    monkeypatch.setattr(Source, "take", noted)
    whole = parts_of([marker * 30_000], tools)
    assert len(lengths) >= 30_000
    assert max(lengths) < 2 * 4096
    assert whole == parts_of([marker] * 30_000, tools)


THOUGHTS: list[tuple[str, str, str, Found]] = [
    ("qwen3", "", "<think>\nHm.\n</think>\n\nYes.", ("Hm.", "Yes.", [])),
    ("qwen3", "", "\n<think></think>Yes.", ("", "Yes.", [])),
    ("qwen3", "", "Yes <think>no</think>", ("", "Yes <think>no</think>", [])),
    ("qwen3", "", "<thin", ("", "<thin", [])),
    ("qwen3", "", " " * 100 + "<think>", ("", " " * 100 + "<think>", [])),
    ("qwen3", "", "<think>x" + " " * 100 + "</think>y", ("x" + " " * 36, "y", [])),
    ("qwen3", "", "  ", ("", "  ", [])),
    ("qwen3", "", "<think>never ends", ("never ends", "", [])),
    ("qwen3", "assistant\n<think>\n", "Hm.\n</think>\n\nYes.", ("Hm.", "Yes.", [])),
    ("qwen3", "<think>\n\n</think>\n\n", "Yes.", ("", "Yes.", [])),
    ("deepseek_r1", "assistant\n", "Hm.</think>Yes.", ("Hm.", "Yes.", [])),
    ("deepseek_r1", "assistant\n", "<think>Hm.</think>Yes.", ("Hm.", "Yes.", [])),
    ("deepseek_r1", "</think>", "Yes.", ("", "Yes.", [])),
    ("magistral", "", "[THINK]Hm.[/THINK]Yes.", ("Hm.", "Yes.", [])),
    ("seed_oss", "", "<seed:think>Hm.</seed:think>Yes.", ("Hm.", "Yes.", [])),
    ("seed_oss", "<seed:think><seed:cot_budget_reflect>", "0.\n</seed:think>Yes.", ("0.", "Yes.", [])),
    ("gemma4", "<|turn>model\n", "<|channel>thought\nHm.\n<channel|>Yes.", ("Hm.", "Yes.", [])),
    ("gemma4", "", "<|channel>thousand reasons<channel|>Yes.", ("thousand reasons", "Yes.", [])),
    ("gemma4", "", "<|channel>thought\n<channel|>Yes.", ("", "Yes.", [])),
    ("gemma4", "<|channel>thought\n", "Hm.<channel|>Yes.", ("Hm.", "Yes.", [])),
    ("gemma4", "<|channel>thought\n<channel|>", "Yes.", ("", "Yes.", [])),
    ("gemma4", "<|channel>thought\n", "<|channel>thought\nHm.<channel|>Yes.", ("Hm.", "Yes.", [])),
    ("gemma4", "<|turn>model\n", "thought\nHm.<channel|>Yes.", ("Hm.", "Yes.", [])),
    ("gemma4", "<|turn>model\n", "thoughts", ("", "thoughts", [])),
    ("gemma4", "a thought", "Yes.", ("", "Yes.", [])),
    ("kimi", "", "◁think▷Hm.◁/think▷Yes.", ("Hm.", "Yes.", [])),
    ("qwen3", "", f"<think>\nI call {HERMES_F}?</think>\n{HERMES_F}", (f"I call {HERMES_F}?", "", [F1])),
]


def test_a_template_that_shows_calls_of_seed_oss() -> None:
    markers = ("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>")
    tokens = {text: number for number, text in enumerate(markers)}
    parsing = OutputFormats(f"</seed:think> {S_F}", tokens, tokens.values()).parsing("assistant\n", NAMES)
    assert parsing is not None
    assert parsing.kept == frozenset(tokens.values())
    text = f"<seed:think>Hm.</seed:think>\nI look.\n{S_F}"
    want = "Hm.", "I look.", [("f", '{"s": "1\\n2", "n": null}')]
    for pieces in ([text], list(text)):
        parser = parsing.parser(7)
        assert found([part for piece in pieces for part in parser.feed(piece)] + parser.end()) == want


def test_a_template_that_shows_calls_of_minimax() -> None:
    """Its thoughts are between tags that are no special tokens, and its prompts end with the first one."""
    markers = ("<minimax:tool_call>", "</minimax:tool_call>")
    tokens = {text: number for number, text in enumerate(markers)}
    formats = OutputFormats(f"<think> </think> <minimax:tool_call>{M_F}", tokens, tokens.values())
    parsing = formats.parsing("]~b]ai\n<think>\n", NAMES)
    assert parsing is not None
    assert parsing.kept == frozenset(tokens.values())
    text = f"Hm.\n</think>\n\nI look.\n<minimax:tool_call>\n{M_F}</minimax:tool_call>"
    parser = parsing.parser(7)
    assert found([*parser.feed(text), *parser.end()]) == ("Hm.", "I look.", [("f", M_ARGUMENTS)])


def test_a_template_that_shows_calls_of_gemma() -> None:
    """Thoughts are in a channel that the template shows, too. Tokens of texts stay out of the content."""
    markers = (*gemma4.MARKERS, "<|channel>", "<channel|>")
    tokens = {text: number for number, text in enumerate(markers)}
    template = "'<|channel>thought\n<channel|>' '<|tool_call>call:' + name"
    formats = OutputFormats(template, tokens, tokens.values())
    parsing = formats.parsing("<|turn>model\n", NAMES)
    assert parsing is not None
    assert parsing.kept == frozenset(tokens.values())
    text = f'<|channel>thought\nHm.\n<channel|>I <|"|>look<|"|>.\n{G4_F}{G4_G}'
    for pieces in ([text], formats.markers.pieces(text)):
        parser = parsing.parser(7)
        said = found([part for piece in pieces for part in parser.feed(piece)] + parser.end())
        assert said == ("Hm.", "I look.", [F1, G])


@pytest.mark.parametrize(("reasoning", "prompt_end", "text", "want"), THOUGHTS)
def test_reasoning(reasoning: str, prompt_end: str, text: str, want: Found) -> None:
    whole = parts_of([text], "hermes", reasoning, prompt_end)
    assert found(whole) == want
    assert parts_of(list(text), "hermes", reasoning, prompt_end) == whole


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("<think>Hm.\n<tool_call>g</tool_call>", ("Hm.", "", [G])),
        ("<think>Hm.</think>\n<tool_call>g</tool_call>", ("Hm.", "", [G])),
        ("<think>Hm.<tool_call>g</tool_call>\n<tool_call>g</tool_call>\nSo.", ("Hm.", "So.", [G, G])),
        ("<think><tool_call>g</tool_call>", ("", "", [G])),
        ("<think>Hm.<tool_call>", ("Hm.", "<tool_call>", [])),
        ("<think>Hm.<tool", ("Hm.<tool", "", [])),
    ],
)
def test_glms_thoughts_end_with_a_call(text: str, want: Found) -> None:
    whole = parts_of([text], "glm45", "glm45")
    assert found(whole) == want
    assert parts_of(list(text), "glm45", "glm45") == whole
    without = OutputFormats("", {}, (), "glm45", "glm45").parsing("", None)
    assert without is not None
    parser = without.parser(7)
    (part,) = joined([*parser.feed("<think>Hm.<tool_call>g</tool_call>"), *parser.end()])
    assert part == Reasoning("Hm.<tool_call>g</tool_call>"), "a request without tools has no calls"


@pytest.mark.parametrize("thoughts", ["<think>Hm.</think>", "<think>Hm."])
def test_kimis_thoughts_end_with_calls(thoughts: str) -> None:
    text = f"{thoughts}{K_BEGIN}{K_CALL}functions.g:0{K_ARGUMENTS}{{}}{K_END}<|tool_calls_section_end|>"
    whole = parts_of([text], "kimi_k2", "kimi_k2")
    assert found(whole) == ("Hm.", "", [G])
    assert parts_of(list(text), "kimi_k2", "kimi_k2") == whole


@pytest.mark.parametrize(
    ("reasoning", "continued", "text", "want"),
    [
        ("qwen3", "<think>\nLet me see", " now.\n</think>\n\nYes.", (" now.", "Yes.", [])),
        ("qwen3", "<think>\n", "\nHm.</think>Yes.", ("Hm.", "Yes.", [])),
        ("qwen3", "<think>\nHm.\n</think>\n\nIt", " is.", ("", " is.", [])),
        ("qwen3", "It", " is.", ("", " is.", [])),
        ("qwen3", "It writes <think> at", " first.", ("", " first.", [])),
        ("qwen3", "<think>\nHm.\n</think>\n\nIt writes <think> at", " first.", ("", " first.", [])),
        ("qwen3", "It writes </think> at", " last.", ("", " last.", [])),
        ("deepseek_r1", "Hm.</think>It", " is.", ("", " is.", [])),
        ("deepseek_r1", "Hm", ".</think>It is.", (".", "It is.", [])),
    ],
)
def test_a_thought_goes_on(reasoning: str, continued: str, text: str, want: Found) -> None:
    formats = OutputFormats("", {}, (), "none", reasoning)
    parsing = formats.parsing(f"assistant\n{continued}", NAMES, continued=continued)
    assert parsing is not None
    whole, cut = parsing.parser(7), parsing.parser(7)
    assert found(whole.feed(text) + whole.end()) == want
    assert found([part for char in text for part in cut.feed(char)] + cut.end()) == want


@pytest.mark.parametrize(
    ("reasoning", "written", "continued", "text", "want"),
    [
        ("deepseek_r1", "<think>\n\n</think>\n\n", "The answer is", " 42.", ("", " 42.", [])),
        ("qwen3-thinking", "</think>", " The answer\n", "is 42.", ("", "is 42.", [])),
        ("qwen3", "<think>\n", "Hm", ".</think>It is.", (".", "It is.", [])),
        ("qwen3", "<think>\n\n</think>\n\n", "<think>\nHm", ".</think>It is.", (".", "It is.", [])),
        ("qwen3", "<think>\n\n</think>\n\n", "<think>\n", "Hm.</think>It is.", ("Hm.", "It is.", [])),
    ],
)
def test_a_template_opens_or_closes_thoughts_before_a_message_that_goes_on(
    reasoning: str, written: str, continued: str, text: str, want: Found
) -> None:
    formats = OutputFormats("", {}, (), "none", reasoning)
    parsing = formats.parsing(f"assistant\n{written}{continued}", NAMES, continued=continued)
    assert parsing is not None
    assert found(parsing.parser(7).feed(text)) == want


def test_channels_without_reasoning_and_calls_are_content() -> None:
    formats = OutputFormats("", {}, (), "openai", "none")
    text = f"{ANALYSIS}{NEXT}{TO_F} <|constrain|>json<|message|>{{}}"
    for parsing in (
        formats.parsing("", None),
        OutputFormats("", {}, (), "openai").parsing("", None, with_reasoning=False),
        OutputFormats("", {}, (), "none", "openai").parsing("", NAMES, with_reasoning=False),
    ):
        assert parsing is not None
        parser = parsing.parser(1)
        assert found(parser.feed(text) + parser.end()) == ("", "Hm.{}", [])


PIECES = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "f", "arguments": ',
        "{}", '{"a": [1, "x"]}', "}",
        "<function=f>", "<parameter=", "</parameter>", "</function>", "<arg_key>", "</arg_key>",
        "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|channel|>",
        "<|message|>", "analysis", "to=functions.f",
        "<|end|>", D_BEGIN, D_CALL, D_SEP, D_CALL_END, "function", "```json", "[f(a=1)]",
        "[", "]", "(", ")", '"', ",", "\\", "\n", " ", "f", "g", "a=1", "1", "<", "é", "name",
    ]
)  # fmt: skip


@given(st.lists(PIECES), st.data())
@example(["<think>", "</think>", "<tool_call>"], None)
def test_no_text_fails_and_no_cut_matters(words: list[str], data: Any) -> None:
    text = "".join(words)
    cuts = [] if data is None else sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    for name in ONE_NAME_EACH:
        parts = parts_of(pieces, name, "qwen3")
        assert parts == parts_of([text], name, "qwen3")
        for _, arguments in found(parts)[2]:
            assert isinstance(json.loads(arguments), dict)


ONE_NAME_EACH = [*{one: name for name, one in TOOL_PARSERS.items()}.values(), "openai"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON, st.sampled_from([None, 1]), st.integers(0, 60), st.sampled_from(list('{}[]",:x0 \\\n')))
def test_the_scanner_agrees_with_the_json_module(value: Any, indent: int | None, at: int, char: str) -> None:
    text = json.dumps([value], indent=indent, ensure_ascii=False)
    scanner = JsonScanner()
    assert scanner.take(text + "tail") == (len(text), text)
    assert scanner.done
    changed = text[:at] + char + text[at + 1 :]
    scanner = JsonScanner()
    count, valid = scanner.take(changed)
    if scanner.done:
        assert json.loads(valid) == json.loads(changed[:count], strict=False)
    else:
        with pytest.raises(json.JSONDecodeError):
            json.loads(changed, strict=False)


@pytest.mark.parametrize(
    ("templates", "tools", "reasoning"),
    [
        ("{{ 'plain' }}", None, None),
        ("<tool_call></tool_call> <think></think>", "hermes", "qwen3"),
        ("[THINK] [/THINK]", None, "magistral"),
        ("[TOOL_CALLS]", "mistral_list", None),
        ("[TOOL_CALLS] [ARGS]", "mistral", None),
        (f"{D_CALL} </think>", "deepseek_v31", "qwen3"),
        (f"{D_CALL} ```json", "deepseek_v3", None),
        (f"<{DSML}function_calls> <think></think>", "deepseek_v32", "qwen3"),
        (f"<{DSML}tool_calls> <{DSML}invoke <think></think>", "deepseek_v4", "qwen3"),
        (f"{K_BEGIN}{K_CALL} <think></think>", "kimi_k2", "kimi_k2"),
        ('{"name": function name, "parameters": dictionary of argument', "llama3_json", None),
        ("[func_name1(params_name1=", "pythonic", None),
        ("<tool_call> <function=", "qwen3_coder", None),
        ("<tool_call> <arg_key> <think></think>", "glm45", "glm45"),
    ],
)
def test_formats_are_chosen_from_the_template(
    templates: str, tools: str | None, reasoning: str | None
) -> None:
    formats = OutputFormats(templates, {}, ())
    assert formats.tools == (tools and TOOL_PARSERS[tools])
    assert formats.reasoning == (reasoning and REASONING_PARSERS[reasoning])
    assert OutputFormats(templates, {}, (), "none", "none").parsing("", NAMES) is None


def test_names_of_parsers_are_checked() -> None:
    for names in (("hermess", "auto"), ("auto", "qwen")):
        with pytest.raises(ConfigError, match="is unknown; give one of auto, none, "):
            OutputFormats("", {}, (), *names)


def test_ids_of_calls_are_the_room_s() -> None:
    def ids(room: int) -> list[str]:
        parsing = OutputFormats("", {}, (), "hermes", "none").parsing("", NAMES)
        assert parsing is not None
        parts = parsing.parser(room).feed(HERMES_F * 2)
        return [part.id for part in parts if isinstance(part, CallStart)]

    assert ids(1) == ids(1)
    assert len({*ids(1), *ids(2)}) == 4


def test_calls_of_kimi_keep_the_ids_that_the_model_gave_them_unless_it_gives_one_twice() -> None:
    parsing = OutputFormats("", {}, (), "kimi_k2", "none").parsing("", NAMES)
    assert parsing is not None
    written = "".join(
        f"{K_CALL}{own}{K_ARGUMENTS}{{}}{K_END}" for own in ("functions.f:3", "f:3", "f:3", "g")
    )
    parts = parsing.parser(1).feed(written)
    first, second, third, last = [part.id for part in parts if isinstance(part, CallStart)]
    assert (first, second, last) == ("functions.f:3", "f:3", "g")
    assert third.startswith("call_")


def test_a_call_of_kimi_that_has_only_a_number_is_of_the_one_tool_there_is() -> None:
    parsing = OutputFormats("", {}, (), "kimi_k2", "none").parsing("", {"only": {}})
    assert parsing is not None
    parser = parsing.parser(1)
    text = f'{K_CALL}3{K_ARGUMENTS}{{"a": 1}}{K_END}'
    parts = joined([part for char in text for part in parser.feed(char)] + parser.end())
    assert parts == [CallStart(0, "functions.only:3", "only"), CallArguments(0, '{"a": 1}')]


def test_a_call_of_kimi_that_has_only_a_number_may_be_of_several_tools() -> None:
    for tools in ({"f": SCHEMA, "h": SCHEMA}, {"f": {"properties": "no"}, "h": {}}, {}):
        parsing = OutputFormats("", {}, (), "kimi_k2", "none").parsing("", tools)
        assert parsing is not None
        text = f'{K_CALL}3{K_ARGUMENTS}{{"n": 1}}{K_END}'
        assert found(parsing.parser(1).feed(text)) == ("", text, [])


def test_special_tokens_are_kept_for_the_parser_and_from_the_content() -> None:
    formats = OutputFormats("", {"<tool_call>": 5, "<other>": 6}, {5, 6}, "hermes", "none")
    parsing = formats.parsing("", NAMES)
    assert parsing is not None
    assert parsing.kept == {5}
    parser = parsing.parser(1)
    assert found(parser.feed(f"<tool_call>x</tool_call> {HERMES_F}") + parser.end()) == (
        "", "x</tool_call>", [F1],
    )  # fmt: skip
