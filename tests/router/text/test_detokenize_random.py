"""Whatever tokens come, in whatever order: the pieces make what decoding them all at once makes."""

from __future__ import annotations

import codecs
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken

from router.text.detokenize import Detokenizer, DetokenizerFactory, WindowDetokenizer
from router.text.tokenization import Tokenization
from tests.support.tokenizers import byte_fallback, byte_level

BYTES = [f"<0x{value:02X}>" for value in range(256)]
_KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback}
# Added tokens whose letters a byte-level alphabet reads as other bytes, and ones with spaces.
_ADDED = ["<tool call>", "café", "東京", "<é>"]


@cache
def tokenization(kind: str) -> Tokenization:
    with TemporaryDirectory() as directory:
        made = Tokenization(_KINDS[kind](Path(directory)))
    made.tokenizer.add_tokens([AddedToken(text, normalized=False) for text in _ADDED])
    made.vocab_size = made.tokenizer.get_vocab_size(with_added_tokens=True)
    made.detokenizers = DetokenizerFactory(made.tokenizer)
    return made


def token_lists(kind: str) -> st.SearchStrategy[list[int]]:
    """Any tokens; runs of single bytes, valid UTF-8 or not; and the added ones often."""
    made = tokenization(kind)
    size, tokenizer = made.vocab_size, made.tokenizer
    added = sorted(tokenizer.get_added_tokens_decoder())
    if kind == "byte_fallback":
        names = BYTES
    else:
        names = [name for name in tokenizer.get_vocab() if len(name) == 1]
    single = [token for name in names if (token := tokenizer.token_to_id(name)) is not None]
    some = st.one_of(st.integers(0, size - 1), st.sampled_from(single), st.sampled_from(added))
    text = st.text(max_size=8).map(lambda value: made.encode(value, add_special_tokens=False))
    return st.lists(st.one_of(some.map(lambda token: [token]), text), max_size=30).map(
        lambda parts: [token for part in parts for token in part]
    )


codecs.register_error("each byte", lambda error: ("\ufffd" * (error.end - error.start), error.end))  # type: ignore[attr-defined]


def expected(kind: str, tokens: list[int], skip: bool) -> str:
    """The library's decoding. Byte fallback: of runs of bytes that are not UTF-8, each byte by itself."""
    made = tokenization(kind)
    if kind == "byte_level":
        return str(made.tokenizer.decode(tokens, skip_special_tokens=skip))
    text, run = "", b""
    for token in tokens:
        name = made.tokenizer.id_to_token(token)
        if skip and token in made.detokenizers.special_ids:
            continue
        if name in BYTES:
            run += bytes([BYTES.index(name)])
        else:
            text += run.decode("utf-8", "each byte") + name.replace("\u2581", " ")
            run = b""
    return (text + run.decode("utf-8", "each byte")).removeprefix(" ")


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", list(_KINDS))
def test_pieces_of_any_tokens_make_the_whole_decoding(kind: str, skip: bool) -> None:
    made = tokenization(kind)

    @given(tokens=token_lists(kind))
    def check(tokens: list[int]) -> None:
        detokenizer = made.detokenizers.make(skip)
        pieces = [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]
        want = expected(kind, tokens, skip)
        assert "".join(pieces) == want
        library = made.tokenizer.decode(tokens, skip_special_tokens=skip)
        assert want == library or "\ufffd" in library

    check()


@pytest.mark.parametrize("kind", list(_KINDS))
@given(text=st.text(max_size=40))
def test_pieces_of_any_text_make_the_text(kind: str, text: str) -> None:
    made = tokenization(kind)
    tokens = made.encode(text, add_special_tokens=False)
    detokenizer = made.detokenizers.make(skip_special_tokens=False)
    pieces = [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]
    assert "".join(pieces) == made.tokenizer.decode(tokens, skip_special_tokens=False)
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


@given(text=st.text(max_size=20))
def test_a_decoder_of_another_kind_is_asked_with_a_window(text: str) -> None:
    tokenizer = tokenization("byte_fallback").tokenizer
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    window = WindowDetokenizer(tokenizer, frozenset())
    pieces = [*(window.push(token) for token in tokens), window.flush()]
    assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize("kind", [*_KINDS, "window"])
@pytest.mark.parametrize("skip", [True, False])
@given(before=st.text(max_size=20), text=st.text(min_size=1, max_size=20))
@example("The quick", "brown")
@example("", "brown")
def test_an_output_is_what_it_adds_to_its_prompts_text(kind: str, skip: bool, before: str, text: str) -> None:
    made = tokenization("byte_fallback" if kind == "window" else kind)
    factory, tokenizer = made.detokenizers, made.tokenizer
    detokenizer: Detokenizer = factory.make(skip)
    if kind == "window":
        detokenizer = WindowDetokenizer(tokenizer, factory.special_ids if skip else frozenset())
    special = min(factory.special_ids)  # as BOS, or the end of a turn
    prompt = [special, *made.encode(before, add_special_tokens=False), *[special] * 5]
    output = made.encode(text, add_special_tokens=False)
    detokenizer.follow(prompt)
    pieces = [*(detokenizer.push(token) for token in output), detokenizer.flush()]
    known = tokenizer.decode(prompt, skip_special_tokens=skip)
    assert known + "".join(pieces) == tokenizer.decode(prompt + output, skip_special_tokens=skip)
