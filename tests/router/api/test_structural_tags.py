"""What structural tags allow: texts are taken, or refused, by the grammars made of them."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from common.errors import InvalidRequest
from router.api.structural_tags import StructuralTag
from router.text.tokenization import Tokenization
from router.text.tool_formats.syntax import Markers
from tests.support.tokenizers import byte_level
from wire.grammars import LIMITS, grammar_problem, matcher_grammar
from wire.request import Grammar, GrammarKind

CALL, CALL_END = "<tool_call>", "</tool_call>"  # each one token
A_DIGIT = {"type": "regex", "pattern": "[0-9]"}
WEATHER = {
    "begin": "<function=weather>",
    "content": {
        "type": "json_schema",
        "json_schema": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
    "end": "</function>",
}
NOW = {"begin": "<function=now>", "content": {"type": "const_string", "value": "{}"}, "end": "</function>"}
ROME = '<function=weather>{"city": "Rome"}</function>'
NOON = "<function=now>{}</function>"
TRIGGERED = {"type": "triggered_tags", "triggers": ["<function="], "tags": [WEATHER, NOW]}
SEPARATED = {"type": "tags_with_separator", "tags": [WEATHER, NOW], "separator": ", "}
THOUGHT = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}


@pytest.fixture(scope="module")
def tokenization(tmp_path_factory: pytest.TempPathFactory) -> Tokenization:
    path = byte_level(tmp_path_factory.mktemp("tags"))
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (CALL, CALL_END)])
    tokenizer.save(str(path / "tokenizer.json"))
    return Tokenization(path)


def grammar_of(tag: dict[str, Any], tokenization: Tokenization) -> Grammar:
    markers = Markers(tokenization.added_ids())
    wanted = StructuralTag.model_validate(tag).wanted("response_format", markers)
    grammar = Grammar(GrammarKind.LARK, wanted.value)
    assert grammar_problem(grammar) == "", wanted.value
    return grammar


def takes(grammar: Grammar, text: str, tokenization: Tokenization) -> bool:
    """Whether a text may be all of an output."""
    size, end = tokenization.vocab_size, tokenization.added_ids()["<|im_end|>"]
    tokenizer = LLTokenizer(tokenization.tokenizer.to_str(), n_vocab=size, eos_token=[end])
    matcher = LLMatcher(tokenizer, matcher_grammar(grammar), log_level=0, limits=LIMITS)
    tokens = tokenization.encode(text, False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": "const_string", "value": 'a/"b"\n'}, ['a/"b"\n'], ["", "a/"]),
    ({"type": "regex", "pattern": "a/\n[0-9]+"}, ["a/\n7"], ["a", "a/7"]),
    ({"type": "grammar", "grammar": 'root ::= "a" x\nx ::= [0-9] "}"'}, ["a1}"], ["a", "1}"]),
    ({"type": "grammar", "grammar": 'start: "a" x\nx: /[0-9]/'}, ["a1"], ["a"]),
    ({"type": "json_schema", "json_schema": {"type": "integer"}}, ["12"], ["x"]),
    ({"type": "any_text"}, ["", "any\ntext"], [f"a{CALL}"]),
    ({"type": "any_text", "excludes": ["no", "never"]}, ["", "yes\nyes", "n"], ["a no", "never"]),
    (
        {"type": "sequence", "elements": [{"type": "const_string", "value": "a"}, A_DIGIT]},
        ["a1"], ["a", "1", "1a"],
    ),
    ({"type": "or", "elements": [{"type": "const_string", "value": "a"}, A_DIGIT]}, ["a", "1"], ["a1", ""]),
    (THOUGHT, ["<think></think>", "<think>a\n</b></think>"], ["<think>", "a</think>", "<think></think>b"]),
    (
        {**THOUGHT, "end": ["</think>", "<stop>"]},
        ["<think>a</think>", "<think>a<stop>"], ["<think>a</think>b", "<think>a<stop></think>"],
    ),
    (
        {**THOUGHT, "content": {"type": "any_text", "excludes": ["<function="]}},
        ["<think>a</think>"], ["<think><function=x</think>"],
    ),
    (
        {"type": "sequence", "elements": [THOUGHT, TRIGGERED]},
        ["<think>a</think>", f"<think>a</think>b{ROME}c"], [f"b{ROME}", f"<think>a</think>{ROME[:-1]}"],
    ),
    (
        TRIGGERED,
        ["", "text", ROME, f"a{ROME}b{NOON}c", f"{ROME}{ROME}", "<function"],
        ["<function=", "a<function=other>", f"{ROME}<function=no", ROME.replace("Rome", "Bonn")],
    ),
    (
        {**TRIGGERED, "at_least_one": True},
        [ROME, f"{ROME}a", f"{NOON}a{ROME}"], ["", f"a{ROME}", "text"],
    ),
    (
        {**TRIGGERED, "stop_after_first": True},
        ["", "text", f"a{ROME}"], [f"{ROME}a", f"{ROME}{ROME}"],
    ),
    (
        {**TRIGGERED, "stop_after_first": True, "at_least_one": True},
        [ROME, NOON], ["", f"a{ROME}", f"{ROME}a"],
    ),
    ({**TRIGGERED, "excludes": ["secret"]}, ["a", f"a{ROME}b"], ["a secret", f"secret{ROME}"]),
    (
        {**TRIGGERED, "triggers": ["<function=w", "<function=n"]},
        [f"a{ROME}b{NOON}", "<function="], ["<function=w", "<function=no"],
    ),
    (
        {"type": "tag", "begin": "[", "content": TRIGGERED, "end": "]"},
        ["[]", f"[a{ROME}b]"], ["[", f"[{ROME}", f"[a]{ROME}"],
    ),
    (  # a tag without an end
        {
            "type": "tag", "begin": "[", "end": "]",
            "content": {"type": "tag", "begin": "(", "content": {"type": "any_text"}, "end": ""},
        },
        ["[(]", "[(a]"], ["[(a", "[(a]]", "[a]"],
    ),
    (SEPARATED, ["", ROME, f"{ROME}, {NOON}, {ROME}"], [f"{ROME}, ", f"{ROME}{NOON}", "a"]),
    ({**SEPARATED, "at_least_one": True}, [ROME, f"{ROME}, {ROME}"], [""]),
    ({**SEPARATED, "stop_after_first": True}, ["", ROME], [f"{ROME}, {ROME}"]),
    (
        {"type": "tag", "begin": CALL, "content": SEPARATED, "end": CALL_END},
        [f"{CALL}{CALL_END}", f"{CALL}{ROME}{CALL_END}"], [CALL, f"{CALL}a{CALL_END}"],
    ),
    (  # the trigger ends inside of a token
        {
            "type": "triggered_tags", "triggers": ["<tool"],
            "tags": [{"begin": f"{CALL}\n", "content": A_DIGIT, "end": f"\n{CALL_END}"}],
        },
        ["", "<tool", f"a{CALL}\n1\n{CALL_END}b"], [CALL, f"{CALL}1\n{CALL_END}", f"{CALL}\n1"],
    ),
    (  # text, and a token behind it
        {"type": "tag", "begin": "a", "content": {"type": "any_text"}, "end": f"\n{CALL_END}"},
        [f"a\n{CALL_END}", f"ab\nc\n{CALL_END}"], ["a\n", f"ab{CALL_END}"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("format_", "taken", "refused"), CASES)
def test_formats_take_what_they_say(
    tokenization: Tokenization, format_: dict[str, Any], taken: list[str], refused: list[str]
) -> None:
    grammar = grammar_of({"format": format_}, tokenization)
    assert [text for text in taken if not takes(grammar, text, tokenization)] == []
    assert [text for text in refused if takes(grammar, text, tokenization)] == []


def test_the_longest_tokens_are_the_pieces_of_a_text() -> None:
    markers = Markers(dict.fromkeys(("<a>", "<a><b>", "<abc>", "(", "", "<a", "é"), 1))
    pieces = ["x", "<a><b>", "<a>", "<a", "bc", "<abc>", "(", "é", ")"]
    assert markers.pieces("".join(pieces)) == pieces
    assert Markers({}).pieces("<a>") == ["<a>"]
    assert Markers({"<a>": 1}).pieces("") == []
    thousands = Markers({f"<unused{number}>": number for number in range(6000)})
    assert thousands.pieces("<unused<unused59><unused599>") == ["<unused", "<unused59>", "<unused599>"]
    assert thousands._split.pattern.count("unused") == 1, "each token would be tried at each place"


def test_a_short_tag_does_not_become_a_long_grammar(tokenization: Tokenization) -> None:
    """Each free text has each of the ends behind it."""
    texts = {"type": "or", "elements": [{"type": "any_text", "excludes": [f"{n}"]} for n in range(1000)]}
    ends = [f"<end {number}>" for number in range(1000)]
    with pytest.raises(InvalidRequest, match="more than 131072 characters") as refused:
        grammar_of({"format": {"type": "tag", "begin": "", "content": texts, "end": ends}}, tokenization)
    assert refused.value.param == "response_format"


def test_structures_are_tags_of_json(tokenization: Tokenization) -> None:
    schema = WEATHER["content"]["json_schema"]  # type: ignore[index]
    older = {
        "structures": [
            {"begin": "<function=weather>", "schema": schema, "end": "</function>"},
            {"begin": "<function=now>", "end": "</function>"},
        ],
        "triggers": ["<function="],
    }
    grammar = grammar_of(older, tokenization)
    for text in ("", f"a{ROME}b", "<function=now>[1, null]</function>"):
        assert takes(grammar, text, tokenization), text
    assert not takes(grammar, "<function=weather>{}</function>", tokenization)


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        ({}, "either a format, or structures and triggers"),
        ({"structures": [], "triggers": ["a"]}, "either a format"),
        ({"format": {"type": "any_text"}, "triggers": ["a"]}, "either a format"),
        ({"format": {"type": "sequence", "elements": [{"type": "any_text"}, A_DIGIT]}},
         "response_format.format.elements.0: free text stands last"),
        ({"format": {**TRIGGERED, "triggers": ["<other"]}},
         "response_format.format.tags.0.begin starts with none of the triggers"),
        ({"format": {**TRIGGERED, "tags": [{**NOW, "content": {"type": "any_text"}, "end": ""}]}},
         "response_format.format.tags.0.content: free text stands last"),
        ({"format": {"type": "grammar", "grammar": 'x ::= "a"'}}, "response_format.format.grammar: "),
    ],
)  # fmt: skip
def test_what_no_grammar_can_say_is_refused(
    tokenization: Tokenization, tag: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        grammar_of(tag, tokenization)
    assert words in str(refused.value)
    assert refused.value.param is not None
    assert words.startswith(refused.value.param) or refused.value.param == "response_format"
