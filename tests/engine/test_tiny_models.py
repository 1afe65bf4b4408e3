"""The tiny models are what the oracle needs them to be."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tests.support.tiny_models import FAMILIES, SPECIAL_TOKENS, VOCAB_SIZE, make_tiny


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_parameter_is_random_and_a_function_of_the_seed(family: str, tmp_path: Path) -> None:
    first, again, other = (
        load_file(make_tiny(family, tmp_path / where, seed) / "model.safetensors")
        for where, seed in (("a", 0), ("b", 0), ("a", 1))
    )
    for name, weight in first.items():
        assert weight.std() > 0.01, name
        assert weight.equal(again[name]), name
        assert not weight.equal(other[name]), name


def test_every_id_has_a_text_and_text_survives_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(make_tiny("llama", tmp_path, 0) / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    text = "<|im_start|>user\nhéllo, a tea store\x00<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [256, 257, 258]
