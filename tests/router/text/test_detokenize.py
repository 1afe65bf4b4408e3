from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from common.tokenizer_file import byte_alphabet
from router.text.detokenize import WindowDetokenizer
from router.text.tokenization import Tokenization
from tests.support.tokenizers import byte_fallback, byte_level

TEXTS = [
    "Hello, world! How are you today?",
    "naïve café – Grüße, 東京 and Ελλάδα",
    "🙂🙃👩‍👩‍👧 flags 🇩🇪",
    "  leading and trailing  ",
    "new\nlines\n\nand\ttabs",
]


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def tokenization(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenization:
    build = byte_level if request.param == "byte_level" else byte_fallback
    return Tokenization(build(tmp_path_factory.mktemp(request.param)))


def pieces(tokenization: Tokenization, tokens: list[int], skip: bool = True) -> list[str]:
    detokenizer = tokenization.detokenizers.make(skip)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_make_the_text_and_never_split_a_character(tokenization: Tokenization, text: str) -> None:
    tokens = tokenization.encode(text, add_special_tokens=False)
    got = pieces(tokenization, tokens)
    assert "".join(got) == tokenization.decode(tokens) == text
    assert not any("\ufffd" in piece for piece in got)
    if tokenization.tokenizer.token_to_id("🙂") is None and "🙂" in text:
        assert "" in got  # something was held back


def test_random_tokens_make_what_decoding_them_at_once_makes(tmp_path: Path) -> None:
    tokenization = Tokenization(byte_level(tmp_path))
    draw = random.Random(3)
    for _ in range(50):
        tokens = [draw.randrange(tokenization.vocab_size) for _ in range(40)]
        got = "".join(pieces(tokenization, tokens, skip=False))
        assert got == tokenization.decode(tokens)


def test_bytes_that_are_no_text_do_not_hold_up_the_stream(tmp_path: Path) -> None:
    tokenization = Tokenization(byte_fallback(tmp_path))
    lone: Any = tokenization.tokenizer.token_to_id("<0xE4>")
    letter: Any = tokenization.tokenizer.token_to_id("o")
    got = pieces(tokenization, [lone] * 6 + [letter])
    assert "".join(got) == "\ufffd" * 6 + "o"
    assert got[3] != ""


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "window"])
@pytest.mark.parametrize("text", ["o東x", "o東", "🙂", "é"])
def test_an_output_may_finish_a_character_of_its_prompt(tmp_path: Path, kind: str, text: str) -> None:
    tokenization = Tokenization((byte_level if kind == "byte_level" else byte_fallback)(tmp_path))
    ids = _of_bytes(tokenization, text)
    for count in range(1, len(ids)):
        prompt, output = ids[:count], ids[count:]
        other: Any = tokenization.tokenizer.token_to_id("o")
        for said in (output, [other], [*output[:1], other], [prompt[0], other], []):
            follows = tokenization.detokenizers.make(False)
            if kind == "window":
                follows = WindowDetokenizer(tokenization.tokenizer, frozenset())
            follows.follow(prompt)
            got = "".join(map(follows.push, said)) + follows.flush()
            whole, before = tokenization.decode([*prompt, *said]), tokenization.decode(prompt)
            assert before.rstrip("\ufffd") + got == whole or before + got == whole


def _of_bytes(tokenization: Tokenization, text: str) -> list[int]:
    """A token for each byte of it, but for letters."""
    alphabet = {value: char for char, value in byte_alphabet().items()}
    find: Any = tokenization.tokenizer.token_to_id
    names = [
        (alphabet[byte] if find(alphabet[byte]) is not None else f"<0x{byte:02X}>")
        if byte < 128 or find("<0xE6>") is None
        else f"<0x{byte:02X}>"
        for byte in text.encode()
    ]
    return [find(name) for name in names]


def test_special_tokens_are_skipped_unless_wanted(tokenization: Tokenization) -> None:
    special = min(tokenization.detokenizers.special_ids)
    tokens = [*tokenization.encode("Hello", add_special_tokens=False), special]
    assert "".join(pieces(tokenization, tokens)) == "Hello"
    name = tokenization.tokenizer.id_to_token(special) or ""
    assert "".join(pieces(tokenization, tokens, skip=False)) == "Hello" + name


def test_the_bytes_of_a_token(tokenization: Tokenization) -> None:
    tokens = tokenization.encode("é ☃", add_special_tokens=False)
    joined = b"".join(tokenization.detokenizers.token_bytes(token) for token in tokens)
    assert joined.decode().strip() == "é ☃"
