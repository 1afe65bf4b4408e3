"""A projection onto the vocabulary of which every rank has a part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from engine.families.heads import CappedHead
from engine.parallel.group import _SLOT_BYTES
from engine.parallel.head import DividedHead, divide_head, is_divided_head
from tests.engine.parallel.test_group import group_of, on_all

VOCAB, HIDDEN = 24, 8


def model(tied: bool, bias: bool = False) -> Any:
    """What a transformers model has of these two."""
    torch.manual_seed(0)
    head, embedding = nn.Linear(HIDDEN, VOCAB, bias=bias), nn.Embedding(VOCAB, HIDDEN)
    if tied:
        head.weight = embedding.weight
    return SimpleNamespace(lm_head=head, get_input_embeddings=lambda: embedding)


@pytest.mark.parametrize("rows", [0, 1, 5, _SLOT_BYTES // 16 + 3])
@pytest.mark.parametrize("size", [2, 3])
def test_the_columns_of_all_ranks_come_together(size: int, rows: int) -> None:
    parts = [torch.randn(rows, 7) for _ in range(size)]
    with group_of(size) as group:
        for got in on_all(group, lambda one: one.gather(parts[one.rank])):
            assert torch.equal(got, torch.cat(parts, dim=1))


@pytest.mark.parametrize(("tied", "bias"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("size", [2, 3])
def test_logits_are_those_of_the_whole_head(size: int, tied: bool, bias: bool) -> None:
    whole, hidden = model(tied, bias), torch.randn(5, HIDDEN)
    expected = whole.lm_head(hidden)
    with group_of(size) as group:
        parts = [model(tied, bias) for _ in group]
        for one, part in zip(group, parts, strict=True):
            divide_head(part, one)
        for got in on_all(group, lambda one: parts[one.rank].lm_head(hidden)):
            torch.testing.assert_close(got, expected)
    for part in parts:
        storage = part.lm_head.linear.weight.untyped_storage()
        embedding = part.get_input_embeddings().weight.untyped_storage()
        assert (storage.data_ptr() == embedding.data_ptr()) == tied, "a tied part is held once"
        assert tied or storage.nbytes() == 4 * VOCAB * HIDDEN // size, "nothing else is held"


def test_a_vocabulary_that_does_not_divide_stays_whole() -> None:
    whole = model(tied=True)
    head = whole.lm_head
    with group_of(5) as group:
        divide_head(whole, group[1])
    assert whole.lm_head is head
    assert not is_divided_head(head)


def test_a_head_within_another_module_is_known() -> None:
    with group_of(2) as group:
        assert is_divided_head(CappedHead(DividedHead(nn.Linear(2, 2), group[0]), 30.0))
