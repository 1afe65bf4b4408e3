"""Token ids by tiktoken, for tokenizers of which it gives exactly what the `tokenizers` library gives.

The library makes an object for each word of a text, with offsets that the router does not need. tiktoken
takes a quarter of the time.
"""

from __future__ import annotations

import json
from functools import cache

import tiktoken
from tokenizers import Regex, Tokenizer, normalizers

from router.text.longest_text import any_of
from router.text.tiktoken_tables import merge_ranks, split_pattern

# tiktoken's regular expressions panic on a word of about a million characters.
LONGEST = 1 << 17
# Letters that Unicode 12, 13, 14, 15, 15.1, 16 and 17 added.
_NEW_LETTERS = "\U000119a0\U00010e80\U00010570\U0001e4d0\U0002ebf0\U00010d4a\U00010940"
# ASCII, and a character of each other category of Unicode.
CHARACTERS = "".join(map(chr, range(128))) + (
    "Ééǅʰ東\u0303\u0903\u20dd٣Ⅷ²‿–⁅⁆«»¡×£¨©\xa0\u2028\u2029\x85\u200b\ue000\u0378\U0001f642"
)
_PROBES = (
    *CHARACTERS,
    *(char * count for char in " \na!-1東\u0903" for count in (2, 3, 7, 100, 333)),
    "Hello, world! Don't y'all'd've 'LL 'ſ O'Neill's\tx_y --- C++ 3.14159 1234567 <html>",
    "  two  spaces \n\n\n lines\r\n\r\n\tindent   \r  end  ",
    "Grüße aus München – naïve café, coöperate cafe\u0301 ﬁﬀ ŉ",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. Ελλάδα, Ξεσκεπάζω",
    "東京都は日本の首都です。中文分词很难，１２３。한국어도 있다.",
    "مرحبا بالعالم ١٢٣، שלום עולם", "नमस्ते दुनिया १२३। ภาษาไทย தமிழ்",
    "🙂🙃👩‍👩‍👧 🇩🇪 ❤️ \u200b\u200d\ufeff x\u0000y\u001b[0m\x7f",
    "\n".join(f"def f{n}(self, a: int = {n ** n}) -> None:  # {'=' * n}" for n in range(12)),
    CHARACTERS, CHARACTERS[::-1], " ".join(CHARACTERS), _NEW_LETTERS, " ".join(_NEW_LETTERS), "x" * 5000, "",
)  # fmt: skip


class TiktokenEncoder:
    """Token ids for one tokenizer. Any thread may call it; tiktoken works outside of the GIL."""

    def __init__(self, tokenizer: Tokenizer, pattern: str, ranks: dict[bytes, int], nfc: bool) -> None:
        """`tokenizer` cuts text by `pattern` and has these ids; its normaliser is NFC, or none."""
        self._encoding = tiktoken.Encoding("baton", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        self._normalizer = normalizers.NFC() if nfc else None
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token.content: token_id for token_id, token in added.items()}
        plain = {
            token.content
            for token in added.values()
            if not (token.normalized or token.lstrip or token.rstrip or token.single_word)
        }
        others = self._added.keys() - plain
        self._plain = any_of(plain)
        self._others = any_of({*others, *map(self._normalized, others)})
        self._before, self._after = _frame(tokenizer)

    @classmethod
    def make(cls, tokenizer: Tokenizer) -> TiktokenEncoder | None:
        """An encoder, or None if tiktoken cannot stand in for this tokenizer."""
        parts = json.loads(tokenizer.to_str())
        normalizer = (parts["normalizer"] or {}).get("type")
        pattern = split_pattern(parts["pre_tokenizer"])
        if (
            pattern is None
            or normalizer not in (None, "NFC")
            or not _same_letters()
            or not _cuts_all(pattern)
        ):
            return None
        ranks = merge_ranks(parts["model"], tokenizer.model)
        if ranks is None:
            return None
        made = cls(tokenizer, pattern, ranks, nfc=normalizer is not None)
        return made if all(made._agrees(tokenizer, probe) for probe in _PROBES) else None

    def encode(self, text: str, add_special_tokens: bool) -> list[int] | None:
        """What the tokenizer gives, or None for a text that must go to the tokenizer: a very long one, or one
        with an added token that takes spaces with it or is looked for in normalised text."""
        if self._others is not None and self._others.search(text):
            return None
        ids = list(self._before) if add_special_tokens else []
        parts = self._plain.split(text) if self._plain is not None else [text]
        for position, part in enumerate(parts):
            if position % 2:
                ids.append(self._added[part])
            elif part:
                part = self._normalized(part)
                if len(part) > LONGEST or (self._others is not None and self._others.search(part)):
                    return None
                ids += self._encoding.encode_ordinary(part)
        if add_special_tokens:
            ids += self._after
        return ids

    def _normalized(self, text: str) -> str:
        if self._normalizer is None or text.isascii():
            return text
        return str(self._normalizer.normalize_str(text))

    def _agrees(self, tokenizer: Tokenizer, text: str) -> bool:
        ids = self.encode(text, add_special_tokens=True)
        return ids is None or ids == tokenizer.encode(text).ids


def _frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer puts before and after a text."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    framed = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(framed) - len(bare) + 1):
        if framed[start : start + len(bare)] == bare:
            return framed[:start], framed[start + len(bare) :]
    return [], []  # they replace the text: the probes will tell


def _bytes_encoding(pattern: str) -> tiktoken.Encoding:
    """The bytes of all that matches the pattern; tiktoken leaves out the rest."""
    return tiktoken.Encoding(
        "bytes",
        pat_str=pattern,
        mergeable_ranks={bytes([value]): value for value in range(256)},
        special_tokens={},
    )


@cache
def _same_letters() -> bool:
    """Whether the regular expressions of both libraries follow the same version of Unicode."""
    ours = bytes(_bytes_encoding(r"\p{L}").encode_ordinary(_NEW_LETTERS))
    return ours.decode() == normalizers.Replace(Regex(r"\P{L}"), "").normalize_str(_NEW_LETTERS)


def _cuts_all(pattern: str) -> bool:
    """Whether each character of a text is in a word. (The library makes words of what does not match, too.)

    A pattern of split_pattern's kind that matches a character alone matches something wherever that begins.
    """
    words = _bytes_encoding(pattern)
    return all(bytes(words.encode_ordinary(char)) == char.encode() for char in CHARACTERS)
