"""What tiktoken needs to stand in for a byte-level BPE tokenizer, for tokenizers where it can.

tiktoken joins the two neighbours whose joined bytes have the smallest id. The `tokenizers` library joins the
two neighbours that come first in a list of merges. Both give the same tokens if ids rise along that list, and

- without `ignore_merges`: the merges alone make each token from the token's own text. A stretch of a word is
  merged like the same text alone, as long as no merge crosses its borders. So the last two pieces of a token
  are always the same two, and the list has that pair.
- with `ignore_merges` (a word that is a token is taken whole, which tiktoken always does): the list has every
  two tokens that join to a token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from tokenizers import models

from common.tokenizer_file import KIMI_WORDS, byte_alphabet

# The pattern that the library's ByteLevel has built in: GPT-2's.
_BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# What both engines, Oniguruma and Rust's fancy-regex, read in the same way: characters, classes of these,
# groups; no count of a count; no look-ahead but the usual one for spaces, at the end.
_CHARACTER = r"\\p\{(?:L[ultmo]?|[MNPS])\}|\\[srnt]|[ '/A-Za-z0-9]"
_SAME_IN_BOTH = re.compile(
    rf"(?:(?:{_CHARACTER}|\[\^?(?:{_CHARACTER}|-)+\]|\(\?i?:|\)|\|)(?:[?*+]|\{{\d+(?:,\d*)?\}})?)+"
    r"(?:\\s\+\(\?!\\S\)\|\\s\+)?"
)


def split_pattern(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """The regular expression that cuts text into words; None if the pre-tokenizer does anything else too.

    `pre_tokenizer` is that part of a tokenizer.json.
    """
    steps = [pre_tokenizer or {}]
    if steps[0].get("type") == "Sequence":
        steps = steps[0]["pretokenizers"]
    *before, last = steps or [{}]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space") or len(before) > 1:
        return None
    if not before:
        return _BYTE_LEVEL if last.get("use_regex") else None
    split = before[0]
    if last.get("use_regex") or split.get("type") != "Split" or split.get("invert"):
        return None
    pattern = split["pattern"].get("Regex")
    if split["behavior"] != "Isolated" or pattern is None:
        return None
    is_same = pattern == KIMI_WORDS or _SAME_IN_BOTH.fullmatch(pattern)
    return str(pattern) if is_same else None


def merge_ranks(model: dict[str, Any], loaded: models.Model) -> dict[bytes, int] | None:
    """The id of each token's bytes; None if tiktoken would merge some word otherwise than the model.

    `model` is that part of a tokenizer.json, `loaded` the same as the library's object.
    """
    if model["type"] != "BPE" or any(
        model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    ):
        return None
    vocab: dict[str, int] = model["vocab"]
    merges = [(left, right) for left, right in model["merges"]]
    merged = [left + right for left, right in merges]
    alphabet = byte_alphabet()
    if not alphabet.keys() <= vocab.keys() or not _rise(vocab[name] for name in merged):
        return None
    if model.get("ignore_merges"):
        names = {name for name in vocab if alphabet.keys() >= set(name)}
        if not set(merges) >= set(_pairs(names)):
            return None
    else:
        names = {*alphabet, *merged}
        if any(len(loaded.tokenize(name)) != 1 for name in names):
            return None
    return {bytes(alphabet[char] for char in name): vocab[name] for name in names}


def _rise(ids: Iterable[int]) -> bool:
    ordered = list(ids)
    return ordered == sorted(ordered)


def _pairs(names: set[str]) -> Iterable[tuple[str, str]]:
    """Every two tokens that join to a token."""
    for name in names:
        for cut in range(1, len(name)):
            if name[:cut] in names and name[cut:] in names:
                yield name[:cut], name[cut:]
