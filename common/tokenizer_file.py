"""The tokenizer.json of a model directory, or what stands for it where Kimi's models have tiktoken.model.

Such a file has a line for each token: its bytes in base64, and its id. Kimi's own code, which comes with the
models, adds the pattern that cuts texts into words, and 256 special tokens behind the others, of which
tokenizer_config.json names some.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

NAMES = ("tokenizer.json", "tiktoken.model")
"""Of these files a model has at least one. The first is taken if both are there."""

_CLASS = "TikTokenTokenizer"
_SPECIAL_TOKENS = 256
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_HEAD, _TAIL = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_WORDS = "|".join(
    (
        r"[\p{Han}]+",
        f"{_HEAD}{_UPPER}*{_LOWER}+{_TAIL}",
        f"{_HEAD}{_UPPER}+{_LOWER}*{_TAIL}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def tokenizer_json(directory: Path) -> str:
    """The text of the file, or of what stands for it. Raises as load_tokenizer does."""
    if _has_ranks(directory):
        return _kimi_of(directory).to_str()
    return (directory / NAMES[0]).read_text("utf-8")


def load_tokenizer(directory: Path) -> Tokenizer:
    """The same as the library's object. Raises FileNotFoundError if there is none of NAMES, ValueError for a
    tiktoken.model that is not of Kimi's kind, and Exception, as the library does, for another bad file."""
    if _has_ranks(directory):
        return _kimi_of(directory)
    return Tokenizer.from_str(tokenizer_json(directory))


def _has_ranks(directory: Path) -> bool:
    whole, ranks = (directory / name for name in NAMES)
    return ranks.is_file() and not whole.is_file()


def _kimi_of(directory: Path) -> Tokenizer:
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    if config.get("tokenizer_class") != _CLASS:
        raise ValueError(f"tokenizer_class is {config.get('tokenizer_class')!r} beside {NAMES[1]}")
    return kimi_tokenizer(_ranks(directory / NAMES[1]), config.get("added_tokens_decoder") or {})


def kimi_tokenizer(ranks: dict[bytes, int], added: dict[str, Any]) -> Tokenizer:
    """`ranks`: id of each token, from 0 on. `added`: entries of added_tokens_decoder, by their ids."""
    letters = {byte: char for char, byte in byte_alphabet().items()}

    def text(token: bytes) -> str:
        return token.decode("latin-1").translate(letters)

    vocab = {text(token): rank for token, rank in ranks.items()}
    merges = [(text(left), text(right)) for left, right in _merges(ranks)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(KIMI_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        added.get(str(token), {"content": f"<|reserved_token_{token}|>", "special": True})
        for token in range(len(ranks), len(ranks) + _SPECIAL_TOKENS)
    ]
    tokenizer.add_tokens(
        [AddedToken(one["content"], normalized=False, special=bool(one.get("special"))) for one in special]
    )
    return tokenizer


def _ranks(path: Path) -> dict[bytes, int]:
    try:
        pairs = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{path} has a line that is no token and its id ({error})") from None
    if sorted(ranks.values()) != list(range(len(pairs))):
        raise ValueError(f"the ids of {path} are not 0 to {len(pairs) - 1}, each once")
    return ranks


def _merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Every two tokens that join to a token, the token with the smallest id first: tiktoken joins whatever
    two neighbours give that."""
    for token in sorted(ranks, key=ranks.__getitem__):
        parts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right) for left, right in parts if left in ranks and right in ranks]
        yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    GPT-2 introduced the convention: printable characters of Latin-1 stand for themselves, characters from
    U+0100 on for the other bytes in order.
    """
    itself = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(value): value for value in itself}
    others = [value for value in range(256) if value not in set(itself)]
    alphabet.update({chr(0x100 + index): value for index, value in enumerate(others)})
    return alphabet
