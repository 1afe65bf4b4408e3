"""What is computed together where a model is divided."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import Olmo2Config, Olmo2ForCausalLM
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from engine.parallel.sums import DividedNorm, put_sums
from tests.engine.parallel.test_group import group_of, on_all

HEADS, DIM = 6, 8


def norm_of(weight: torch.Tensor) -> Olmo2RMSNorm:
    norm = Olmo2RMSNorm(len(weight), eps=0.01)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_a_norm_of_all_heads_is_that_of_the_whole(size: int, dtype: torch.dtype) -> None:
    weight, x = torch.randn(HEADS * DIM), torch.randn(1, 5, HEADS * DIM).to(dtype)
    expected = norm_of(weight)(x)
    parts, columns = weight.chunk(size), x.chunk(size, -1)
    with group_of(size) as group:
        norms = [DividedNorm(norm_of(parts[one.rank]), one) for one in group]
        got = on_all(group, lambda one: norms[one.rank](columns[one.rank]))
    assert {one.dtype for one in got} == {dtype}
    torch.testing.assert_close(torch.cat(list(got), -1), expected)


def test_heads_that_several_ranks_have_count_as_often_as_others() -> None:
    """Two heads, and four ranks."""
    weight, x = torch.randn(2 * DIM), torch.randn(1, 3, 2 * DIM)
    expected = norm_of(weight)(x).chunk(2, -1)
    parts, columns = weight.chunk(2), x.chunk(2, -1)
    with group_of(4) as group:
        norms = [DividedNorm(norm_of(parts[one.rank // 2]), one) for one in group]
        for rank, got in enumerate(on_all(group, lambda one: norms[one.rank](columns[one.rank // 2]))):
            torch.testing.assert_close(got, expected[rank // 2])


def test_only_norms_of_all_heads_are_divided() -> None:
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = Olmo2ForCausalLM(Olmo2Config(**shape, vocab_size=64))
    with group_of(2) as group:
        put_sums(model, group[0])
    divided = [name for name, module in model.named_modules() if isinstance(module, DividedNorm)]
    assert divided == [f"model.layers.{i}.self_attn.{kind}_norm" for i in range(2) for kind in "qk"]
