"""The tiny models are what the oracle needs them to be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tests.support.reference import reference_model
from tests.support.tiny_configs import FAMILIES, MIXED, SIMILAR, VOCAB_SIZE
from tests.support.tiny_models import SPECIAL_TOKENS, make_tiny

EVERY = sorted({**FAMILIES, **MIXED, **SIMILAR})
CONSTANT = "act_fn.eps"  # of Apertus: it keeps a quotient finite
UNSEEN = ".0.attn_hc.scale"  # of DeepSeek-V4: all streams are equal, and the middle value stays in its place


@pytest.mark.parametrize("family", EVERY)
def test_every_parameter_is_random_and_a_function_of_the_seed(family: str, tmp_path: Path) -> None:
    first, again, other = (
        load_file(make_tiny(family, tmp_path / where, seed) / "model.safetensors")
        for where, seed in (("a", 0), ("b", 0), ("a", 1))
    )
    for name, weight in first.items():
        if name.endswith(CONSTANT):
            continue
        assert weight.numel() <= 2 or weight.float().std() > 0.01, name
        assert weight.equal(again[name]), name
        assert not weight.equal(other[name]), name


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=() if family in FAMILIES else pytest.mark.oracle_full) for family in EVERY],
)
@torch.inference_mode()
def test_every_parameter_matters(family: str, tmp_path: Path) -> None:
    """Each one in reverse order, or a number doubled, changes the logits of some token: none of them may be
    forgotten unseen."""
    model = reference_model(make_tiny(family, tmp_path, 0), 0)
    ids = torch.randint(0, 256, (1, 64), generator=torch.Generator().manual_seed(0))
    right = model(ids).logits
    saved = model.state_dict()
    for name in saved:
        if name.endswith((f".{model.config.num_hidden_layers - 1}.layer_scalar", CONSTANT, UNSEEN)):
            continue  # after the scalar comes a norm
        tensor = saved[name]
        kept = tensor.clone()
        tensor.copy_(2 * kept if kept.numel() == 1 else kept.flatten().flip(0).view_as(kept))
        assert (model(ids).logits - right).abs().max() > 1e-3, name
        tensor.copy_(kept)


def test_every_id_has_a_text_and_text_survives_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(make_tiny("llama", tmp_path, 0) / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    text = "<|im_start|>user\nhéllo, a tea store\x00<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [256, 257, 258]
