"""Token ids from the table of words are those of the tokenizers library, or there are none."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from router.index.native.build import native
from router.text.split_pattern import split_steps
from router.text.word_cache import PythonWordTable, WordCache, WordTable, ascii_pattern, make_word_table
from tests.support.tokenizers import byte_fallback, byte_level

_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KINDS = ("gpt2", "bos", "llama3", "o200k", "demo")


@cache
def tokenizer(kind: str) -> Tokenizer:
    if kind == "demo":
        return Tokenizer.from_file(str(Path(__file__).parents[3] / "deploy/demo_model/tokenizer.json"))
    with TemporaryDirectory() as directory:
        path = byte_level(Path(directory), bos=kind == "bos") / "tokenizer.json"
        made = Tokenizer.from_file(str(path))
    if kind in ("llama3", "o200k"):
        split = Regex(_LLAMA_3 if kind == "llama3" else _O200K)
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(split, "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    longer = ["<|im_start|>user", "<tool call>"]  # one begins as another one does
    made.add_tokens([AddedToken(text, normalized=False) for text in longer])
    made.add_tokens(
        [AddedToken("<mask>", normalized=False, lstrip=True), AddedToken("NORM", normalized=True)]
    )
    return made


@cache
def words(kind: str, compiled: bool = True) -> WordCache:
    made = WordCache.make(tokenizer(kind), make_word_table if compiled else PythonWordTable)
    assert made is not None
    assert isinstance(made._table, PythonWordTable) is not compiled
    return made


_TEXT = st.lists(
    st.one_of(
        st.text(st.characters(codec="ascii"), max_size=6),
        st.sampled_from(["'s", "'LL", "  ", "\n\n", "\r\n", "\t ", "\x1c", "\x0b", "1234", "Hello", " the"]),
        st.sampled_from(["<|im_start|>", "<|im_end|>", "user", "<think>", "<tool call>", "<mask>", "NORM"]),
    ),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", _KINDS)
@given(text=_TEXT, special=st.booleans())
def test_ids_are_the_librarys(kind: str, compiled: bool, text: str, special: bool) -> None:
    got = words(kind, compiled).encode(text, add_special_tokens=special)
    if got is not None:
        assert got == tokenizer(kind).encode(text, add_special_tokens=special).ids
    else:
        assert "<mask>" in text or "NORM" in text


def test_what_is_not_ascii_or_has_a_token_that_takes_spaces_is_left_to_the_library() -> None:
    for text in ("naïve", "東京", "a <mask>", "NORMAL"):
        assert words("gpt2").encode(text, add_special_tokens=True) is None


@pytest.mark.parametrize("make_table", [make_word_table, lambda split: PythonWordTable(split, 3)])
def test_a_full_table_starts_again(
    monkeypatch: pytest.MonkeyPatch, make_table: Callable[[re.Pattern[str]], WordTable]
) -> None:
    monkeypatch.setattr("router.text.word_cache._MOST_WORDS", 3)
    made = WordCache.make(tokenizer("gpt2"), make_table)
    assert made is not None
    text = " ".join(f"word{'x' * number}" for number in range(20))
    assert made.encode(text, add_special_tokens=True) == tokenizer("gpt2").encode(text).ids


def test_a_tokenizer_that_does_not_work_word_by_word_has_no_table(tmp_path: Path) -> None:
    assert WordCache.make(Tokenizer.from_file(str(byte_fallback(tmp_path / "b") / "tokenizer.json"))) is None
    lower = Tokenizer.from_file(str(byte_level(tmp_path / "l") / "tokenizer.json"))
    lower.normalizer = normalizers.Lowercase()
    assert WordCache.make(lower) is None
    spaced = Tokenizer.from_file(str(byte_level(tmp_path / "s") / "tokenizer.json"))
    spaced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert WordCache.make(spaced) is None


@pytest.mark.parametrize(
    "pattern",
    [r"\p{Greek}+", r"\w+", r"[a-z&&[^b]]+", r"[]a]+", r"^a", r"a$", r"\p{N}{1,3}+", r"(a)b", r"(a"],
)
def test_a_pattern_that_may_mean_something_else_is_not_understood(pattern: str) -> None:
    assert ascii_pattern(pattern) is None


def compiled_table(pattern: str, most_words: int = 1000) -> WordTable:
    module, steps = native(), split_steps(pattern)
    assert module is not None
    assert steps is not None
    made: WordTable = module.WordTable(steps, most_words, 8)
    return made


def spelled(word: str) -> list[int]:
    return [1000 + len(word), *map(ord, word)]


_CLASS = st.sampled_from(["[a-c]", "[^a]", "[ \\t]", "[\\t-\\r ]", "[b-]", "a", " ", "\\n", "'"])
_STEP = st.builds(str.__add__, _CLASS, st.sampled_from(["", "?", "*", "+", "{1,2}", "{2}", "{2,}"]))
_END = st.sampled_from(["", "(?!a)", "(?![^\\t-\\r ])", "(?i:'s|b)?"])
_PATTERN = st.lists(
    st.one_of(
        st.builds(str.__add__, st.lists(_STEP, min_size=1, max_size=3).map("".join), _END),
        st.just("(?i:'s|'bc)"),
    ),
    min_size=1,
    max_size=4,
).map("|".join)


@given(pattern=_PATTERN, texts=st.lists(st.text("aAbBc s'\t\n", max_size=12), max_size=4))
def test_text_is_cut_as_by_re(pattern: str, texts: list[str]) -> None:
    """A word's ids are its letters and its length here; the table is soon full."""
    steps = split_steps(pattern)
    if steps is None:  # an alternative that may be empty
        assert re.match(pattern, "", re.ASCII)
        return
    table, reference = (
        compiled_table(pattern, most_words=2),
        PythonWordTable(re.compile(pattern, re.ASCII), 2, 8),
    )
    for text in texts:
        assert table.encode(text, spelled) == reference.encode(text, spelled)


@pytest.mark.parametrize(
    "pattern",
    [
        r"a*", r"a|b?", r"(a)b", r"(?:ab)+", r"a+?", r"a++", r"a{0}b", r"a{2,1}b", r"\d+", r"a.b", r"(?=a)b",
        r"a(?!b)c", r"(?i:'s)?a", r"[a", r"(?!ab)c", r"[\d]+", r"é+", "a\\", r"+a",
    ],
)  # fmt: skip
def test_a_pattern_of_another_kind_is_left_to_re(pattern: str) -> None:
    assert split_steps(pattern) is None


def test_what_a_table_is_given_is_checked() -> None:
    table = compiled_table("[a-z]+")
    assert table.encode("ab 1", lambda _: [1]) is None
    with pytest.raises(ValueError, match="not ASCII"):
        table.encode("é", lambda _: [1])
    with pytest.raises(KeyError):
        table.encode("abc", lambda word: {}[word])
    with pytest.raises(ValueError, match="a list"):
        table.encode("abc", lambda _: "x")  # type: ignore[arg-type, return-value]
    wrong: list[Callable[[str], Any]] = [lambda _: [-1], lambda _: [1 << 32], lambda _: ["x"]]
    for learn in wrong:
        with pytest.raises((ValueError, TypeError, OverflowError)):
            table.encode("abc", learn)
    assert table.encode("abc", lambda _: [7, 8]) == [7, 8]
    assert table.encode("abc", lambda _: [9]) == [7, 8], "it is known now"
