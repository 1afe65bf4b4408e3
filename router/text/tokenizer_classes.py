"""Tokenizer classes that transformers rebuilds with its own code instead of reading all of tokenizer.json.

For a class named here transformers keeps the vocabulary, the merges and the post-processor of the file and
replaces the rest. This module does the same; otherwise token ids would differ for files of other versions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

_METASPACE = "\u2581"
# The split of Qwen's vocabularies (as in their tokenizer.json files): contractions, words with at most one
# leading sign, single digits, signs, line ends, spaces.
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def special_defaults(declared: str) -> dict[str, str]:
    """Special tokens that a class has if the configuration does not name them."""
    return _DEFAULTS.get(declared.removesuffix("Fast"), {})


def rebuild(tokenizer: Tokenizer, declared: str, config: dict[str, Any]) -> None:
    """Change a tokenizer as transformers does for the class `declared` in its configuration."""
    change = _REBUILDERS.get(declared.removesuffix("Fast"))
    if change is not None:
        change(tokenizer, config)


def _llama(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    if "ByteLevel" in json.dumps(json.loads(tokenizer.to_str()).get("pre_tokenizer")):
        return  # a Llama 3 file under Llama 2's class name, which transformers leaves as it is
    prefixed = config.get("add_prefix_space")
    prefixed = True if prefixed is None else bool(prefixed)
    scheme = ("always" if config.get("legacy", False) else "first") if prefixed else "never"
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_METASPACE, scheme, split=False)
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_METASPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )


def _qwen2(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    prefixed = bool(config.get("add_prefix_space") or False)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=prefixed, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()


_REBUILDERS: dict[str, Callable[[Tokenizer, dict[str, Any]], None]] = {
    "LlamaTokenizer": _llama,
    "Qwen2Tokenizer": _qwen2,
}
_DEFAULTS: dict[str, dict[str, str]] = {
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
}
