"""Incremental detokenisation: the text that each token adds, in whole characters.

There are three ways, for three kinds of decoders. The first two use a table and do not call the library:

- byte-level BPE (Qwen, Llama 3): a token is a fixed byte string, and the text is UTF-8 over all of them;
- byte fallback (Llama 2, Mistral): a token is a fixed text, or one byte of a character;
- any other: a token's text may depend on its neighbours, so a small window is decoded with and without the
  new token, and the difference is the token's text.

(To decode all tokens at each step takes quadratic time.) The text is that of decoding all tokens at once, and
for an output what it adds to its prompt's text: many decoders leave out the space with which a text begins.
There is one exception: for one invalid byte in a run of byte tokens the library replaces the whole run; here
the valid characters of the run stay.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from itertools import islice
from typing import Any, Protocol

from tokenizers import Tokenizer

from common.tokenizer_file import byte_alphabet

_Utf8 = codecs.getincrementaldecoder("utf-8")
_UNFINISHED = "\ufffd"
_METASPACE = "\u2581"
_REPLACE = {"type": "Replace", "pattern": {"String": _METASPACE}, "content": " "}
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
# A window that ends in U+FFFD waits for the rest of a character, which has at most 4 byte tokens. If it waits
# for longer, its bytes are not UTF-8.
_LONGEST_CHARACTER = 4


class Detokenizer(Protocol):
    """The text of one choice."""

    def follow(self, prompt: Sequence[int]) -> None:
        """What is pushed from now on goes on with a prompt's text. Call it before the first push."""

    def push(self, token: int) -> str:
        """The text that `token` completes, or "" while a character is unfinished."""

    def flush(self) -> str:
        """U+FFFD for what is left of an unfinished character after the last token, or ""."""


class DetokenizerFactory:
    """Makes detokenizers for one tokenizer, and holds the table that they share."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.special_ids = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
        self._bytes = _byte_table(tokenizer) if decoder.get("type") == "ByteLevel" else None
        self._pieces = _piece_table(tokenizer) if _is_byte_fallback(decoder) else None
        self._strip = _STRIP in decoder.get("decoders", ())

    @property
    def longest_token_bytes(self) -> int:
        """Bytes of the longest token of the vocabulary, or a few more."""
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        named = self._bytes.values() if self._bytes is not None else (text.encode() for text in vocab)
        return max(map(len, named))

    def make(self, skip_special_tokens: bool = True, kept: frozenset[int] = frozenset()) -> Detokenizer:
        """A new detokenizer. `kept`: special tokens that stay in the text."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        if kept:
            skipped -= kept
        if self._bytes is not None:
            return ByteLevelDetokenizer(self._bytes, skipped)
        if self._pieces is not None:
            return ByteFallbackDetokenizer(self._pieces, skipped, self._strip)
        return WindowDetokenizer(self._tokenizer, skipped)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, for logprobs: exact for byte-level tokenizers, else those of its text."""
        if self._bytes is not None:
            return self._bytes.get(token, b"")
        piece = _piece(self._tokenizer.id_to_token(token) or "")
        return piece if isinstance(piece, bytes) else piece.encode()


class ByteLevelDetokenizer:
    """For byte-level BPE."""

    def __init__(self, table: dict[int, bytes], skipped: frozenset[int]) -> None:
        self._table = table
        self._skipped = skipped
        self._decoder = _Utf8("replace")
        self._begun = 0  # 1: the prompt ends within a character, and nothing has been said yet

    def follow(self, prompt: Sequence[int]) -> None:
        """The bytes of a token depend on what is before it only if that ends within a character."""
        for token in _last_shown(prompt, self._skipped, _LONGEST_CHARACTER):
            self._decoder.decode(self._table.get(token, b""))
        self._begun = 1 if self._decoder.getstate()[0] else 0

    def push(self, token: int) -> str:
        if token in self._skipped:
            return ""
        return self._own(self._decoder.decode(self._table.get(token, b"")))

    def flush(self) -> str:
        return self._own(self._decoder.decode(b"", True))

    def _own(self, text: str) -> str:
        if self._begun and text:
            text, self._begun = _without_begun(text, self._begun), 0
        return text


class ByteFallbackDetokenizer:
    """For vocabularies of texts and of single bytes. `strip`: a text loses one leading space."""

    def __init__(self, table: dict[int, str | bytes], skipped: frozenset[int], strip: bool) -> None:
        self._table = table
        self._skipped = skipped
        self._strip = strip
        self._unfinished = b""  # the first bytes of a character
        self._begun = 0  # how many of them the prompt has, if nothing has been said yet

    def follow(self, prompt: Sequence[int]) -> None:
        for token in _last_shown(prompt, self._skipped, _LONGEST_CHARACTER):
            self._read(token)
        self._begun = len(self._unfinished)
        if _last_shown(prompt, self._skipped, 1):
            self._strip = False

    def push(self, token: int) -> str:
        text = "" if token in self._skipped else self._read(token)
        return self._own(text) if self._begun and text else text

    def _read(self, token: int) -> str:
        piece = self._table.get(token, "")
        if isinstance(piece, bytes):
            self._unfinished += piece
            text = self._finished()
        elif self._unfinished and piece:
            text = self._no_text() + piece
        else:
            text = piece
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        return self._own(self._no_text())

    def _own(self, text: str) -> str:
        text, self._begun = _without_begun(text, self._begun), 0
        return text

    def _no_text(self) -> str:
        """U+FFFD for each byte of an unfinished character."""
        text, self._unfinished = _UNFINISHED * len(self._unfinished), b""
        return text

    def _finished(self) -> str:
        """The complete characters, and U+FFFD for each byte that cannot be part of one."""
        text = ""
        while True:
            try:
                text += self._unfinished.decode()
            except UnicodeDecodeError as error:
                text += self._unfinished[: error.start].decode()
                self._unfinished = self._unfinished[error.start :]
                if error.reason == "unexpected end of data":
                    return text
                text += _UNFINISHED
                self._unfinished = self._unfinished[1:]
            else:
                self._unfinished = b""
                return text


class WindowDetokenizer:
    """For decoders that look at neighbours.

    `_window[:_shown]` are tokens whose text was returned, kept as context; the rest waits. One earlier piece
    is enough: decoders look one token back (spaces), or over one run of byte tokens.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._window: list[int] = []
        self._shown = 0
        self._context = ""  # text of _window[:_shown]

    def follow(self, prompt: Sequence[int]) -> None:
        self._window = _last_shown(prompt, self._skipped, _LONGEST_CHARACTER)
        self._shown = len(self._window)
        self._context = self._decode(self._window)

    def push(self, token: int) -> str:
        if token in self._skipped:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(_UNFINISHED) and len(self._window) - self._shown < _LONGEST_CHARACTER:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        return self._advance(self._decode(self._window)) if len(self._window) > self._shown else ""

    def _advance(self, text: str) -> str:
        shown = self._context
        if not text.startswith(shown):  # the prompt ended within a character, which is finished now
            shown = shown.rstrip(_UNFINISHED)
        addition = text[len(shown) :]
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        self._context = self._decode(self._window)
        return addition

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text


def _without_begun(text: str, count: int) -> str:
    """The first text of an output, without U+FFFD for `count` bytes of a character that its prompt has begun
    and it has not finished: the prompt's text has them."""
    return text[min(count, len(text) - len(text.lstrip(_UNFINISHED))) :]


def _last_shown(prompt: Sequence[int], skipped: frozenset[int], most: int) -> list[int]:
    """The last tokens of a prompt that are part of its text."""
    shown = (token for token in reversed(prompt) if token not in skipped)
    return list(islice(shown, most))[::-1]


def _byte_table(tokenizer: Tokenizer) -> dict[int, bytes]:
    """The bytes of every token of a byte-level vocabulary.

    A token with a character outside the alphabet is plain text. (An added token is read by the alphabet, too.
    That is wrong for one like "café", but the tokenizers library does the same.)
    """
    alphabet = byte_alphabet()
    return {
        token_id: bytes(alphabet[char] for char in text)
        if all(char in alphabet for char in text)
        else text.encode()
        for text, token_id in tokenizer.get_vocab(with_added_tokens=True).items()
    }


def _is_byte_fallback(decoder: dict[str, Any]) -> bool:
    """Replace, ByteFallback, Fuse and perhaps Strip: a token's text does not depend on its neighbours."""
    steps = list(decoder.get("decoders", ()))
    if steps and steps[-1] == _STRIP:
        steps.pop()
    return steps == [_REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}]


def _piece_table(tokenizer: Tokenizer) -> dict[int, str | bytes]:
    """The text, or the byte, of every token."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    return {token_id: _piece(name) for name, token_id in vocabulary.items()}


def _piece(name: str) -> str | bytes:
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        try:
            return bytes([int(name[3:5], 16)])
        except ValueError:
            pass  # not a byte: <0xZZ>
    return name.replace(_METASPACE, " ")
