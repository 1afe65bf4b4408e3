"""Grammars as llguidance takes them. The router checks them and workers compile them, within the same limits.

llguidance needs no tokenizer to check a grammar, and neither torch nor transformers.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits

from wire.request import Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

LONGEST_GRAMMAR = 1 << 17
"""Characters. One of this length takes about a second to compile, most take a millisecond."""

LIMITS = LLParserLimits(
    max_lexer_states=50_000,  # of 1 to 2 kB each
    step_max_items=10_000,  # with more, a mask of an ambiguous grammar takes seconds (docs/decisions/0049)
)
_JSON: JsonCompileOptions = {"whitespace_pattern": r"( |\n[ \t]{0,64})"}
"""Between the parts of JSON, at most once: JSON itself allows white space without end, and so a model that
prefers it to everything else would never come to one."""


def matcher_grammar(grammar: Grammar) -> str:
    """The grammar in the form that llguidance compiles."""
    own = _own(grammar)
    if not grammar.around:
        return own
    if grammar.kind is GrammarKind.LARK:
        body = {"lark_grammar": own}
    else:
        (body,) = json.loads(own)["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": grammar.around}, {**body, "name": "body"}]})


def _own(grammar: Grammar) -> str:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(grammar.text, overrides=_JSON)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)


def grammar_problem(grammar: Grammar) -> str:
    """What is wrong with a grammar; "" if nothing is. Releases the GIL."""
    try:
        text = matcher_grammar(grammar)
    except ValueError as error:  # the schema is no JSON object
        return str(error)
    return LLMatcher.validate_grammar(text, limits=LIMITS).strip()
