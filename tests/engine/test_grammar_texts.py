"""What a client reads matches the grammar: masks and the router's text agree on every kind of tokenizer."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engine.grammar import GrammarCompiler, mask_words
from router.text.tokenization import Tokenization
from tests.support.tiny_models import write_tokenizer
from tests.support.tokenizers import byte_fallback, byte_level
from wire.request import Grammar, GrammarKind, SamplingParams


def tiny(path: Path) -> Path:
    path.mkdir()
    write_tokenizer(path)
    return path


KINDS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "byte_level": (byte_level, "<|im_end|>"),
    "byte_fallback": (byte_fallback, "</s>"),
    "tiny": (tiny, "<|im_end|>"),
}
WORDS = ("Grüße an dich", " with a space", "日本語", "plain", "two  spaces\nand a line", "<think> no thought")
TEXTS: dict[str, tuple[Grammar, Callable[[str], object]]] = {
    "choice": (
        Grammar(GrammarKind.LARK, "start: " + " | ".join(json.dumps(word) for word in WORDS)),
        lambda text: text in WORDS,
    ),
    "regex": (
        Grammar(GrammarKind.REGEX, "[a-zäöü ]{2,12}[.!?]"),
        lambda text: re.fullmatch("[a-zäöü ]{2,12}[.!?]", text),
    ),
    "schema": (
        Grammar(
            GrammarKind.JSON_SCHEMA,
            '{"type": "object", "required": ["ä", "b"], "additionalProperties": false,'
            ' "properties": {"ä": {"type": "string", "maxLength": 9}, "b": {"enum": [" x", "é"]}}}',
        ),
        lambda text: set(json.loads(text)) == {"ä", "b"},
    ),
}


@pytest.mark.parametrize("structure", TEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_shown_matches(tmp_path: Path, kind: str, structure: str) -> None:
    make, end = KINDS[kind]
    model = make(tmp_path / "model")
    tokenization = Tokenization(model)
    vocab, eos = tokenization.vocab_size + 5, tokenization.tokenizer.token_to_id(end)  # a model may have more
    grammar, fits = TEXTS[structure]
    compiler = GrammarCompiler((model / "tokenizer.json").read_text, vocab, [eos])
    rng, prompt = random.Random(8), tokenization.encode("Say:")
    for _ in range(40):
        state = compiler.begin(SamplingParams(grammar=grammar))
        assert state is not None
        row, outputs = np.zeros(mask_words(vocab), dtype=np.int32), []
        detokenizer, text = tokenization.detokenizers.make(), ""
        detokenizer.follow(prompt)
        while True:
            state.follow(outputs, len(outputs), None)
            state.fill(row)
            may = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            assert may.max() < tokenization.vocab_size
            token = int(rng.choice(may))
            if token == eos:
                break
            outputs.append(token)
            text += detokenizer.push(token)
        text += detokenizer.flush()
        assert fits(text), repr(text)
    compiler.close()
