"""The kernels of decode steps on a GPU against their definitions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.cuda.attention_op import decode_attention
from engine.cuda.draw import draw
from engine.cuda.row_product import row_product
from tests.engine.cuda.test_attention_kernel import DTYPES, SHAPES, AttentionCase
from tests.engine.cuda.test_draw_kernel import CASES, DrawCase
from tests.engine.cuda.test_row_kernel import KINDS, SIZES, RowCase
from tests.engine.cuda.test_state_kernels import ALL, Arguments, check


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_fused", [False, True])
def test_attention_is_its_definition(
    shape: AttentionCase, is_fused: bool, dtype: torch.dtype, device: str
) -> None:
    want = shape.inputs(is_fused, dtype)
    got = [each.to(device) if isinstance(each, torch.Tensor) else each for each in want]
    shape.check(got, want, decode_attention)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_products_of_a_row_are_their_definition(
    size: tuple[int, int], kind: RowCase, dtype: torch.dtype, device: str
) -> None:
    want = kind.inputs(size, dtype)
    got = [each.to(device) if isinstance(each, torch.Tensor) else each for each in want]
    kind.check(got, want, row_product)


@pytest.mark.parametrize(("op", "arguments"), ALL)
def test_steps_of_layers_with_states_are_their_definitions(
    op: Callable[..., None], arguments: Arguments, device: str
) -> None:
    own = [each.to(device) if isinstance(each, torch.Tensor) else each for each in arguments]
    check(op, op, arguments, own)


@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("vocab", [50, 9001, 151_936])
def test_draws_are_their_definition(vocab: int, case: DrawCase, dtype: torch.dtype, device: str) -> None:
    want = case.inputs(vocab, dtype)
    got = [each.to(device) if isinstance(each, torch.Tensor) else each for each in want]
    case.check(got, want, draw)
