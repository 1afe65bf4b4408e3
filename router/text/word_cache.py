"""WordCache: the token ids of text that is ASCII, word by word, from a table.

A byte-level BPE tokenizer cuts text into words by a regular expression and merges each word by itself, so a
word's ids never change. The tokenizers library makes objects for every word of every prompt, with offsets
that nobody here asks for; looking words up takes a fifteenth of its time, and prompts were what the router
spent most on. Text that is not ASCII goes to the library: there "letter" and "space" are a matter of Unicode
versions.

Exact or not there: `make` returns None for a tokenizer of which anything is not understood, and `encode` None
for a text that it is not sure of.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Protocol

from tokenizers import Tokenizer

from router.index.native.build import native
from router.text.detokenize import byte_alphabet
from router.text.split_pattern import split_steps

# GPT-2's, which the library's ByteLevel has built in.
_BYTE_LEVEL_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# What the classes of a pattern mean among ASCII characters; a class that is not here is not understood.
_CLASSES = {
    r"\p{L}": "A-Za-z", r"\p{N}": "0-9", r"\p{Lu}": "A-Z", r"\p{Ll}": "a-z", r"\p{Lt}": "", r"\p{Lm}": "",
    r"\p{Lo}": "", r"\p{M}": "", r"\s": r"\t-\r ",
}  # fmt: skip
_PIECE = re.compile(r"\\p\{\w+\}|\\.|\[\^?|\]|.", re.DOTALL)
_PLAIN = frozenset((r"\r", r"\n", r"\t"))
_MOST_WORDS = 1 << 16
_LONGEST_WORD = 64  # longer ones are seldom seen again
_PROBES = ("Hello, world!", " a  b\n\n c\t1234 don't 'LL x_y\r\n  ", '{"a": [1, 2.5]}  // é', "")


class WordTable(Protocol):
    """What ASCII text is made of. Two have this interface: the one in C++ (native/word_table.h), and
    PythonWordTable, for patterns that it does not understand and where nothing can be compiled."""

    def encode(self, text: str, learn: Callable[[str], list[int]]) -> list[int] | None:
        """The ids of all words; `learn` tells those of a word that is not there. None: words are not all."""


class PythonWordTable:
    """See WordTable."""

    def __init__(
        self, split: re.Pattern[str], most_words: int = _MOST_WORDS, longest_word: int = _LONGEST_WORD
    ) -> None:
        self._split = split.findall
        self._most_words = most_words
        self._longest_word = longest_word
        self._ids: dict[str, list[int]] = {}

    def encode(self, text: str, learn: Callable[[str], list[int]]) -> list[int] | None:
        """See WordTable."""
        words = self._split(text)
        if len("".join(words)) != len(text):
            return None
        known, ids = self._ids, []
        for word in words:
            found = known.get(word)
            if found is None:
                found = learn(word)
                self._keep(word, found)
            ids += found
        return ids

    def _keep(self, word: str, ids: list[int]) -> None:
        if len(word) <= self._longest_word:
            if len(self._ids) >= self._most_words:
                self._ids.clear()  # simpler than an order of use, and as good for words of a language
            self._ids[word] = ids


def make_word_table(split: re.Pattern[str]) -> WordTable:
    """The faster one, where it can be had."""
    compiled, steps = native(), split_steps(split.pattern)
    if compiled is None or steps is None:
        return PythonWordTable(split)
    made: WordTable = compiled.WordTable(steps, _MOST_WORDS, _LONGEST_WORD)
    return made


class WordCache:
    """For one tokenizer. One thread."""

    def __init__(self, tokenizer: Tokenizer, table: WordTable) -> None:
        self._tokenizer = tokenizer
        self._model = tokenizer.model
        self._table = table
        self._letters = str.maketrans({chr(byte): char for char, byte in byte_alphabet().items()})
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token.content: token_id for token_id, token in added.items()}
        plain = [
            token.content
            for token in added.values()
            if not (token.normalized or token.lstrip or token.rstrip or token.single_word)
        ]
        # The longest of those that begin at the same place, as the library has it.
        self._cut = _alternatives(plain)
        self._unsure = _alternatives(set(self._added) - set(plain))
        self._before, self._after = _frame(tokenizer)

    @classmethod
    def make(
        cls, tokenizer: Tokenizer, make_table: Callable[[re.Pattern[str]], WordTable] = make_word_table
    ) -> WordCache | None:
        """A cache, or None when the tokenizer does not work word by word."""
        split = _split_of(json.loads(tokenizer.to_str()))
        if split is None:
            return None
        made = cls(tokenizer, make_table(split))
        for probe in _PROBES:
            ids = made.encode(probe, add_special_tokens=True)
            if ids is not None and ids != tokenizer.encode(probe).ids:
                return None
        return made

    def encode(self, text: str, add_special_tokens: bool) -> list[int] | None:
        """What the tokenizer makes of it; None: ask the tokenizer."""
        if not text.isascii() or (self._unsure is not None and self._unsure.search(text)):
            return None
        ids = list(self._before) if add_special_tokens else []
        parts = self._cut.split(text) if self._cut is not None else [text]
        for position, part in enumerate(parts):
            if position % 2:
                ids.append(self._added[part])
            elif part:
                of_part = self._table.encode(part, self._learn)
                if of_part is None:
                    return None
                ids += of_part
        if add_special_tokens:
            ids += self._after
        return ids

    def _learn(self, word: str) -> list[int]:
        return [token.id for token in self._model.tokenize(word.translate(self._letters))]


def _alternatives(texts: Any) -> re.Pattern[str] | None:
    """Any of these, longest first, as a group; None when there are none."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, ordered)) + ")") if ordered else None


def _frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer puts before and after a text."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    framed = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(framed) - len(bare) + 1):
        if framed[start : start + len(bare)] == bare:
            return framed[:start], framed[start + len(bare) :]
    raise AssertionError("a tokenizer's special tokens have replaced its text")


def _split_of(tokenizer: dict[str, Any]) -> re.Pattern[str] | None:
    """The pattern by which a tokenizer cuts ASCII text into words, where that is all it does to it."""
    model, normalizer = tokenizer["model"], tokenizer.get("normalizer")
    if model.get("type") != "BPE" or any(
        model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    ):
        return None
    if normalizer is not None and normalizer.get("type") != "NFC":
        return None
    steps = tokenizer.get("pre_tokenizer") or {}
    steps = list(steps.get("pretokenizers", [])) if steps.get("type") == "Sequence" else [steps]
    last = steps.pop() if steps else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    if not steps:
        return ascii_pattern(_BYTE_LEVEL_SPLIT) if last.get("use_regex") else None
    (first, *others) = steps
    if others or last.get("use_regex") or first.get("type") != "Split" or first.get("invert"):
        return None
    pattern = first.get("pattern", {}).get("Regex")
    return ascii_pattern(pattern) if pattern is not None and first.get("behavior") == "Isolated" else None


def ascii_pattern(pattern: str) -> re.Pattern[str] | None:
    """The same pattern for Python's own `re`, on ASCII text; None when something in it is not understood."""
    made: list[str] = []
    inside, before = False, ""  # a class of characters; the piece before
    for piece in _PIECE.findall(pattern):
        if piece in _CLASSES:
            members = _CLASSES[piece]
            if not inside and not members:
                return None
            made.append(members if inside else f"[{members}]")
        elif piece == r"\S" and not inside:
            made.append(r"[^\t-\r ]")
        elif (piece[0] == "\\" and piece not in _PLAIN) or _read_otherwise(piece, before, inside):
            return None
        else:
            made.append(piece)
            inside = piece[0] == "[" or (inside and piece != "]")
        before = piece
    try:
        compiled = re.compile("".join(made), re.ASCII)
    except re.error:
        return None
    return compiled if compiled.groups == 0 else None


def _read_otherwise(piece: str, before: str, inside: bool) -> bool:
    """Would Oniguruma, the library's engine, or Python's, read this piece in another way than the other?"""
    if inside:  # classes within classes, their intersection, and "[]" as a beginning
        return piece[0] == "[" or (piece == before == "&") or (piece == "]" and before[0] == "[")
    return piece in ("^", "$") or (piece == "+" and before == "}")  # of lines or texts; possessive or not
