"""StoredTensor against the dequantised tensor: whatever is done to it has the same result."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from engine.checkpoint.grouped import GroupedMatrix
from engine.checkpoint.mxfp4 import Mxfp4Matrix
from engine.checkpoint.nvfp4 import Nvfp4Matrix
from engine.checkpoint.scaled import ScaledMatrix
from engine.checkpoint.stored import (
    StoredMatrix,
    StoredTensor,
    dequantise_parameters,
    move_parameters,
)


def fp8(outputs: int = 6, inputs: int = 64, seed: int = 0) -> ScaledMatrix:
    """Blocks of 4 x 32: the last outputs are a block that is cut off."""
    torch.manual_seed(seed)
    numbers = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
    return ScaledMatrix(numbers, torch.rand(-(-outputs // 4), -(-inputs // 32)), (4, 32))


def mxfp4(outputs: int = 6, inputs: int = 64, seed: int = 0) -> Mxfp4Matrix:
    torch.manual_seed(seed)
    codes = torch.randint(0, 256, (outputs, inputs // 32, 16), dtype=torch.uint8)
    return Mxfp4Matrix(codes, torch.randint(110, 140, codes.shape[:2], dtype=torch.uint8))


def nvfp4(outputs: int = 6, inputs: int = 64, seed: int = 0) -> Nvfp4Matrix:
    torch.manual_seed(seed)
    codes = torch.randint(0, 256, (outputs, inputs // 16, 8), dtype=torch.uint8)
    return Nvfp4Matrix(codes, torch.rand(codes.shape[:2]).to(torch.float8_e4m3fn), torch.tensor(0.3))


def int4(outputs: int = 6, inputs: int = 64, seed: int = 0, shuffled: bool = False) -> GroupedMatrix:
    torch.manual_seed(seed)
    group_of = torch.randperm(inputs) // 32 if shuffled else None
    codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    zeros = torch.randint(0, 16, (outputs, inputs // 32), dtype=torch.uint8)
    return GroupedMatrix(codes, torch.rand(outputs, inputs // 32).half(), zeros, inputs, 4, 32, group_of)


def tensor(*rows: StoredMatrix, transposed: bool = False) -> StoredTensor:
    return StoredTensor([rows], torch.bfloat16, experts=False, transposed=transposed)


def experts(*matrices: StoredMatrix, transposed: bool = False) -> StoredTensor:
    return StoredTensor([[each] for each in matrices], torch.bfloat16, experts=True, transposed=transposed)


TENSORS = {
    "fp8": tensor(fp8()),
    "mxfp4": tensor(mxfp4()),
    "nvfp4": experts(nvfp4(), nvfp4(seed=1)),
    "transposed": tensor(mxfp4(), transposed=True),
    "gate and up": tensor(fp8(), fp8(6, seed=1)),
    "int4": tensor(int4()),
    "int4, shuffled": experts(int4(shuffled=True), int4(seed=1), transposed=True),
    "experts": experts(fp8(), fp8(seed=1), fp8(seed=2)),
    "gpt-oss": experts(mxfp4(), mxfp4(seed=1), transposed=True),
}
some = pytest.mark.parametrize("stored", TENSORS.values(), ids=TENSORS)


VIEWS = {
    2: [
        lambda x: x.chunk(2)[0],
        lambda x: x.chunk(2)[-1],
        lambda x: x[::2],
        lambda x: x[1::3],
        lambda x: x[1:5],
        lambda x: x[:, :32],
        lambda x: x[:, 32:],
        lambda x: x[4:],
        lambda x: x[:, 2:8],
        lambda x: torch.stack([x, x]),
    ],
    3: [
        *(lambda x: x[0], lambda x: x[-1], lambda x: x[:, :2], lambda x: x[1:]),
        *(lambda x: x[:, 4:], lambda x: x[:, :, 32:], lambda x: x[..., :2]),
    ],
}
"""By the number of dimensions."""
BOTH = [lambda x: x.transpose(-1, -2), lambda x: x.detach(), lambda x: torch.cat([x, x], dim=-2)]


@given(st.sampled_from(sorted(TENSORS)), st.data())
def test_views_one_after_the_other_are_those_of_the_dequantised_tensor(name, data):
    stored = TENSORS[name]
    dense = stored.dequantised()
    for _ in range(data.draw(st.integers(1, 5))):
        view = data.draw(st.sampled_from(VIEWS[stored.dim()] + BOTH))
        stored, dense = view(stored), view(dense)
        assert stored.shape == dense.shape
        if not isinstance(stored, StoredTensor):
            assert stored.equal(dense)
            return
        assert stored.dequantised().equal(dense)
        places = range(0, dense.numel(), 7)  # of parts and experts in turn, if it is transposed
        assert stored.numbers_at(places).equal(dense.flatten()[:: places.step])


@some
@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: x.float(),
        lambda x: x.flatten(),
        lambda x: x.contiguous(),
        lambda x: torch.cat([x, x], dim=-1),
        lambda x: torch.stack([x, x], dim=1),
        lambda x: x.sum(-1),
    ],
)
def test_all_else_is_computed_with_the_dequantised_tensor(stored, compute):
    got = compute(stored)
    assert type(got) is torch.Tensor
    assert got.equal(compute(stored.dequantised()))


@some
def test_a_product_with_itself_is_that_of_the_dequantised_tensor(stored):
    got, dense = stored @ stored.transpose(-1, -2), stored.dequantised()
    assert type(got) is torch.Tensor
    torch.testing.assert_close(
        got, dense @ dense.transpose(-1, -2)
    )  # torch's rounding depends on the strides


def test_what_transformers_and_the_kernels_do_keeps_it_stored():
    """Merge experts, set parameters, take the gates and ups of one."""
    gates = torch.stack([tensor(fp8()), tensor(fp8(seed=1))])
    ups = torch.stack([tensor(fp8(seed=2)), tensor(fp8(seed=3))])
    merged = nn.Parameter(torch.cat([gates, ups], dim=1), requires_grad=False)
    assert isinstance(merged, StoredTensor)
    gate, up = merged[1].chunk(2)
    assert [part.matrices for part in (gate, up)] == [gates[1].matrices, ups[1].matrices]
    alternating = experts(mxfp4(), mxfp4(seed=1), transposed=True).transpose(1, 2)[1]
    for half in (alternating[::2], alternating[1::2]):
        assert isinstance(half, StoredTensor)
        assert not half.transposed
        assert half.matrices[0][0].shape == (3, 64)


def test_rows_of_a_block_that_is_cut_off_keep_their_scale():
    whole, rows = torch.empty(6, 64), torch.empty(2, 64)
    fp8().dequantise(whole)
    fp8().rows(slice(3, 6, 2)).dequantise(rows)
    assert rows.equal(whole[3:6:2])


@some
def test_it_cannot_be_written(stored):
    before = stored.dequantised()
    for write in (lambda: stored.zero_(), lambda: stored.add_(1), lambda: stored.copy_(before)):
        with pytest.raises(AssertionError, match="would write"):
            write()
    with pytest.raises(AssertionError, match="would write"):
        torch.add(before, before, out=stored)
    assert stored.dequantised().equal(before)
    copy = torch.zeros_like(before)
    assert copy.copy_(stored).equal(before), "it is read by an operation that writes another tensor"


def test_parameters_move_with_their_numbers():
    model = nn.Sequential(nn.Linear(64, 6, bias=False), nn.Linear(2, 2))
    model[0].weight = nn.Parameter(TENSORS["fp8"], requires_grad=False)
    move_parameters(model, torch.device("meta"))
    (part,) = model[0].weight.matrices[0]
    assert {model[0].weight.device.type, part.numbers.device.type, part.scales.device.type} == {"meta"}
    assert model[1].weight.device.type == "cpu"
    whole = TENSORS["gpt-oss"].to("meta")
    assert all(part.codes.device.type == "meta" for (part,) in whole.matrices)
    assert (whole.shape, whole.transposed) == (TENSORS["gpt-oss"].shape, True)


def test_parameters_that_no_kernel_takes_are_dequantised():
    stored, plain = TENSORS["fp8"], torch.ones(2, 2)
    model = nn.Sequential(nn.Linear(64, 6, bias=False), nn.Linear(2, 2))
    model[0].weight = nn.Parameter(stored, requires_grad=False)
    model[1].weight = nn.Parameter(plain, requires_grad=False)
    x = torch.ones(1, 64).bfloat16()
    want = x @ stored.dequantised().T
    assert model[0](x).equal(want)
    dequantise_parameters(model)
    assert type(model[0].weight) is nn.Parameter
    assert model[0](x).equal(want)
    assert model[1].weight.equal(plain)


def test_it_says_what_it_is_without_its_numbers():
    assert repr(TENSORS["experts"]) == "StoredTensor((3, 6, 64), torch.bfloat16)"


@some
def test_halves_of_outputs_and_inputs_stay_stored_and_keep_no_more_than_their_numbers(stored):
    dense = stored.dequantised()
    for dim in (-2, -1):
        count = stored.shape[dim] // 2
        for half in stored.split(count, dim):
            assert isinstance(half, StoredTensor)
        last = half.owned()
        assert last.dequantised().equal(dense.split(count, dim)[-1])
        for part in (part for rows in last.matrices for part in rows):
            numbers = part.numbers if isinstance(part, ScaledMatrix) else part.codes
            assert numbers.untyped_storage().nbytes() == numbers.nbytes


def test_inputs_that_cut_a_block_or_a_byte_are_dequantised():
    for whole, cut in (
        (tensor(fp8()), 16),
        (tensor(mxfp4()), 16),
        (tensor(int4()), 16),
        (tensor(int4()), 31),
    ):
        part = whole[:, :cut]
        assert type(part) is torch.Tensor
        assert part.equal(whole.dequantised()[:, :cut])
    assert isinstance(tensor(int4(shuffled=True))[:, 2:8], StoredTensor), "each input has its own group"


def test_inputs_up_to_a_block_that_is_cut_off_keep_its_scale():
    torch.manual_seed(0)
    numbers = torch.randn(6, 80).to(torch.float8_e4m3fn)
    whole = tensor(ScaledMatrix(numbers, torch.rand(2, 3), (4, 32)))
    part = whole[:, 32:]
    assert isinstance(part, StoredTensor)
    assert part.dequantised().equal(whole.dequantised()[:, 32:])
