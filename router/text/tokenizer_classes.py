"""Tokenizer classes that transformers rebuilds with its own code instead of reading all of tokenizer.json.

For a class named here transformers keeps the vocabulary, the merges and the post-processor of the file and
replaces the rest. This module does the same; otherwise token ids would differ for files of other versions.
For some models, and for a file that is not of the class's kind, it takes the file as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

_METASPACE = "\u2581"
# The split of Qwen's vocabularies (as in their tokenizer.json files): contractions, words with at most one
# leading sign, single digits, signs, line ends, spaces.
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_5_SPLIT = _QWEN_SPLIT.replace(r"\p{L}+|", r"[\p{L}\p{M}]+|").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)
"""The same with marks in words."""


_KEEP_THEIR_FILE = frozenset(
    (
        *("ernie4_5", "ernie4_5_moe", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "granite", "granitemoe"),
        *("granitemoehybrid", "granitemoeshared", "hyperclovax", "kimi_linear", "mimo_v2_flash"),
        *("minimax_m2", "ministral", "ministral3", "mistral", "mistral3", "mixtral", "nemotron", "olmo2"),
        *("olmo3", "olmo_hybrid", "phi3", "stablelm", "flex_olmo", "internlm3", "iquestcoder", "minicpm3"),
    )
)
"""Values of model_type for which transformers takes the file as it is, whatever class is declared."""
_ALWAYS_REBUILT = dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"), "Qwen3_5Tokenizer")
"""model_type -> the class that transformers takes, whatever is declared."""


def rebuilt_class(tokenizer: Tokenizer, declared: str, model_type: str | None) -> str:
    """The class here that transformers makes of the declared one; "": it takes the file as it is."""
    name = _ALWAYS_REBUILT.get(model_type or "", declared.removesuffix("Fast"))
    if model_type in _KEEP_THEIR_FILE or name not in _REBUILDERS:
        return ""
    if name == "LlamaTokenizer" and _is_byte_level(tokenizer):
        return ""  # a Llama 3 or DeepSeek file under Llama 2's class name
    return name


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    return "ByteLevel" in json.dumps(json.loads(tokenizer.to_str()).get("pre_tokenizer"))


def special_defaults(rebuilt: str) -> dict[str, str]:
    """Special tokens that a class has if the configuration does not name them."""
    return _DEFAULTS.get(rebuilt, {})


def rebuild(tokenizer: Tokenizer, rebuilt: str, config: dict[str, Any]) -> None:
    """Change a tokenizer as transformers does for a class of this module."""
    change = _REBUILDERS.get(rebuilt)
    if change is not None:
        change(tokenizer, config)


def _llama(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    prefixed = config.get("add_prefix_space")
    prefixed = True if prefixed is None else bool(prefixed)
    scheme = ("always" if config.get("legacy", False) else "first") if prefixed else "never"
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_METASPACE, scheme, split=False)
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_METASPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )


def _qwen(tokenizer: Tokenizer, config: dict[str, Any], split: str) -> None:
    prefixed = bool(config.get("add_prefix_space") or False)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=prefixed, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()


_REBUILDERS: dict[str, Callable[[Tokenizer, dict[str, Any]], None]] = {
    "LlamaTokenizer": _llama,
    "Qwen2Tokenizer": partial(_qwen, split=_QWEN_SPLIT),
    "Qwen3_5Tokenizer": partial(_qwen, split=_QWEN3_5_SPLIT),
}
_DEFAULTS: dict[str, dict[str, str]] = {
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    "Qwen3_5Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
}
