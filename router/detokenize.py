"""Incremental detokenisation: the text each token adds, never half a character.

Two ways, chosen by the tokenizer's decoder:

- byte-level BPE (Qwen, Llama 3): a token is a fixed byte string, so text is UTF-8 over their concatenation;
- anything else (byte fallback, metaspace: Llama 2, Mistral): what a token adds depends on its neighbours,
  so a small window is decoded with and without the new tokens, and the difference is the addition.

Decoding everything at each step, the obvious way, is quadratic.
"""

from __future__ import annotations

import codecs
import json
from typing import Protocol

from tokenizers import Tokenizer

_UNFINISHED = "\ufffd"
# A window that ends in U+FFFD is waiting for the rest of a character, which is at most 4 byte tokens. One
# that waits for longer holds bytes that are no text.
_LONGEST_CHARACTER = 4


class Detokenizer(Protocol):
    """One choice's text."""

    def push(self, token: int) -> str:
        """The text that `token` completes; "" while a character is unfinished."""

    def flush(self) -> str:
        """What is left of an unfinished character when no more will come (U+FFFD), or ""."""


class DetokenizerFactory:
    """Makes detokenizers for one tokenizer; holds what they share."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.special_ids = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
        self._bytes = _byte_table(tokenizer) if decoder.get("type") == "ByteLevel" else None

    def make(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh detokenizer."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        if self._bytes is not None:
            return ByteLevelDetokenizer(self._bytes, skipped)
        return WindowDetokenizer(self._tokenizer, skipped)

    def token_bytes(self, token: int) -> bytes:
        """One token alone as bytes (for logprobs): exact for byte-level tokenizers, else of its text."""
        if self._bytes is not None:
            return self._bytes.get(token, b"")
        raw = self._tokenizer.id_to_token(token) or ""
        if len(raw) == 6 and raw.startswith("<0x") and raw.endswith(">"):
            return bytes([int(raw[3:5], 16)])
        return raw.replace("\u2581", " ").encode()


class ByteLevelDetokenizer:
    """For byte-level BPE."""

    def __init__(self, table: dict[int, bytes], skipped: frozenset[int]) -> None:
        self._table = table
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """See Detokenizer."""
        if token in self._skipped:
            return ""
        return self._decoder.decode(self._table.get(token, b""))

    def flush(self) -> str:
        """See Detokenizer."""
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """For decoders that look at neighbours.

    `_window[:_shown]` are tokens whose text has gone out, kept as context; the rest waits. A window of one
    earlier piece is enough: decoders look one token back (spaces), or over one run of byte tokens.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._window: list[int] = []
        self._shown = 0
        self._context = ""  # text of _window[:_shown]

    def push(self, token: int) -> str:
        """See Detokenizer."""
        if token in self._skipped:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(_UNFINISHED) and len(self._window) - self._shown < _LONGEST_CHARACTER:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """See Detokenizer."""
        return self._advance(self._decode(self._window)) if len(self._window) > self._shown else ""

    def _advance(self, text: str) -> str:
        addition = text[len(self._context) :]
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        self._context = self._decode(self._window)
        return addition

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text


def _byte_table(tokenizer: Tokenizer) -> dict[int, bytes]:
    """The bytes of every token of a byte-level vocabulary. Added tokens are plain text."""
    alphabet = _byte_alphabet()
    added = tokenizer.get_added_tokens_decoder()
    table = {token_id: token.content.encode() for token_id, token in added.items()}
    for text, token_id in tokenizer.get_vocab(with_added_tokens=False).items():
        if token_id not in table:
            # A character outside the alphabet stands for itself, as in the decoder of the tokenizers library.
            table[token_id] = b"".join(
                bytes([alphabet[char]]) if char in alphabet else char.encode() for char in text
            )
    return table


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level vocabularies write bytes: printable Latin-1 ones stand for
    themselves, the others for characters from U+0100 on, in order (the convention GPT-2 introduced)."""
    itself = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(value): value for value in itself}
    others = [value for value in range(256) if value not in set(itself)]
    alphabet.update({chr(0x100 + index): value for index, value in enumerate(others)})
    return alphabet
