"""A tokenizer of a chosen size for bench.grammar: tokens as long, and as much like text, as a real one's."""

from __future__ import annotations

import random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_SIGNS = '{}[]":,'
_SYLLABLES = [a + b + c for a in "bcdfghklmnprstvw" for b in "aeiou" for c in ("", "n", "r", "s")]


def make_tokenizer(size: int, seed: int = 1) -> Tokenizer:
    """Bytes, pairs of JSON's signs, numbers below 1,000, words of up to four syllables with and without a
    space before them, and three special tokens, of which the last ends an output."""
    rng = random.Random(seed)
    texts = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    texts |= dict.fromkeys(a + b for a in _SIGNS for b in _SIGNS + "ĠĊ")
    texts |= dict.fromkeys(str(number) for number in range(1000))
    while len(texts) < size - len(SPECIAL_TOKENS):
        word = "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(1, 4)))
        texts[rng.choice(("", "Ġ", "Ġ")) + (word.capitalize() if rng.random() < 0.2 else word)] = None
    vocab = {text: token for token, text in enumerate([*texts, *SPECIAL_TOKENS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    return tokenizer
