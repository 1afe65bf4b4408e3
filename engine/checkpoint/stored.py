"""Weights of a model that are still as the checkpoint stored them, in fewer bits.

A StoredTensor takes the place of a dequantised weight while transformers renames, merges and transposes
weights and sets them as parameters. Kernels that multiply stored numbers take its matrices; for all else it
is dequantised. So such a model is never in memory in the dtype in which it computes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
_CPU = torch.device("cpu")


class StoredMatrix(Protocol):
    """A quantised matrix [outputs, inputs]."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def rows(self, rows: slice | torch.Tensor) -> StoredMatrix:
        """Some of its outputs: of a slice no number is copied, int64 indices gather them."""
        ...

    def columns(self, columns: slice) -> StoredMatrix | None:
        """Neighbouring inputs, without copying a number. None: they begin or end within a block."""
        ...

    def owned(self) -> StoredMatrix:
        """A copy, which keeps no more than its own numbers."""
        ...

    def to(self, device: torch.device) -> StoredMatrix: ...

    def dequantise(self, into: torch.Tensor) -> None:
        """Write its numbers, rounded from float32, to a tensor of the same shape and device."""
        ...


class StoredTensor(torch.Tensor):
    """A matrix, or one for each expert, whose rows are those of stored matrices.

    It has the shape and dtype of the dequantised weight. What transformers does to weights while it loads
    them (stack, concatenate, transpose, index, slice rows) gives another StoredTensor; any other operation is
    computed with the dequantised weight. It cannot be written.
    """

    matrices: tuple[tuple[StoredMatrix, ...], ...]
    """For each matrix of the tensor, those that have its rows, in order."""
    transposed: bool
    """Whether the last two dimensions are inputs and outputs, not outputs and inputs."""

    @staticmethod
    def __new__(
        cls,
        matrices: Iterable[Sequence[StoredMatrix]],
        dtype: torch.dtype,
        *,
        experts: bool,
        transposed: bool = False,
        device: torch.device = _CPU,
    ) -> StoredTensor:
        """`experts`: it has three dimensions. All matrices have the same shape, and are on `device`."""
        whole = tuple(tuple(rows) for rows in matrices)
        assert experts or len(whole) == 1
        outputs, inputs = sum(part.shape[0] for part in whole[0]), whole[0][0].shape[1]
        last = (inputs, outputs) if transposed else (outputs, inputs)
        made: StoredTensor = torch.Tensor._make_wrapper_subclass(
            cls, (len(whole), *last) if experts else last, dtype=dtype, device=device
        )
        made.matrices, made.transposed = whole, transposed
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as if it were no class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        assert not _writes_stored(func, args, kwargs), f"{func} would write a weight that is stored"
        if func in _KEPT and (result := _KEPT[func](*args, **kwargs)) is not None:
            return result
        args, kwargs = tree_map_only(StoredTensor, StoredTensor.dequantised, (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's would print numbers
        return f"StoredTensor({tuple(self.shape)}, {self.dtype})"

    def dequantised(self) -> torch.Tensor:
        """The weight as an ordinary tensor."""
        whole = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for matrix, rows in zip(whole.view(-1, *self.shape[-2:]), self.matrices, strict=True):
            target, first = matrix.T if self.transposed else matrix, 0
            for part in rows:
                part.dequantise(target[first : first + part.shape[0]])
                first += part.shape[0]
        return whole

    def contiguous(self, **_: Any) -> torch.Tensor:  # type: ignore[override]
        """Dequantised. Torch's would be this tensor itself, which has no address."""
        return self.dequantised()

    def owned(self) -> StoredTensor:
        """A copy, so that a whole of which this is a part is freed."""
        return self._of([[part.owned() for part in rows] for rows in self.matrices])

    def numbers_at(self, indices: Sequence[int]) -> torch.Tensor:
        """The numbers at these places of the flat tensor. Of each stored matrix the rows that have them are
        dequantised at once."""
        wanted: defaultdict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
        for place, index in enumerate(indices):
            expert, own = divmod(index, math.prod(self.shape[-2:]))
            output, column = divmod(own, self.shape[-1])
            if self.transposed:
                output, column = column, output
            part = 0
            while output >= (rows := self.matrices[expert][part].shape[0]):
                part, output = part + 1, output - rows
            wanted[expert, part].append((output, place, column))
        inputs = self.matrices[0][0].shape[1]
        dense = torch.empty(len(indices), inputs, dtype=self.dtype, device=self.device)
        first = 0
        for (expert, part), each in wanted.items():
            outputs = torch.tensor([output for output, _, _ in each], device=self.device)
            self.matrices[expert][part].rows(outputs).dequantise(dense[first : first + len(each)])
            first += len(each)
        _, places, columns = torch.tensor(list(chain(*wanted.values())), device=self.device).T
        return dense.gather(1, columns[:, None])[places.argsort(), 0]

    def _of(self, matrices: Iterable[Sequence[StoredMatrix]], **other: Any) -> StoredTensor:
        """Of the same dtype, dimensions, order and device, but for what is given of these."""
        same = {"experts": self.dim() == 3, "transposed": self.transposed, "device": self.device}
        return StoredTensor(matrices, self.dtype, **{**same, **other})


def move_parameters(model: nn.Module, device: torch.device) -> None:
    """Put those that are stored on a device, one by one. Module.to might change what a parameter says of
    itself without its stored numbers."""
    _replace_parameters(model, lambda weight: weight.to(device))


def dequantise_parameters(model: nn.Module) -> None:
    """Replace the parameters that are still stored."""
    _replace_parameters(model, StoredTensor.dequantised)


def _replace_parameters(model: nn.Module, made_of: Callable[[StoredTensor], torch.Tensor]) -> None:
    """Those that are stored."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, StoredTensor):
                setattr(module, name, nn.Parameter(made_of(parameter), requires_grad=False))


def _writes_stored(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    arguments = func._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)}
    given.update(kwargs)
    written = (given.get(each.name) for each in arguments if each.alias_info and each.alias_info.is_write)
    return any(isinstance(value, StoredTensor) for value in written)


# Operations that keep a tensor stored. None: this one cannot.


def _same(tensor: StoredTensor) -> StoredTensor:
    return tensor._of(tensor.matrices)


def _stack(tensors: Sequence[Any], dim: int = 0) -> StoredTensor | None:
    if dim != 0 or not all(isinstance(each, StoredTensor) and each.dim() == 2 for each in tensors):
        return None
    first: StoredTensor = tensors[0]
    if any((each.shape, each.transposed) != (first.shape, first.transposed) for each in tensors):
        return None
    return first._of([each.matrices[0] for each in tensors], experts=True)


def _concatenate(tensors: Sequence[Any], dim: int = 0) -> StoredTensor | None:
    """Along the outputs."""
    if not all(isinstance(each, StoredTensor) and not each.transposed for each in tensors):
        return None
    first: StoredTensor = tensors[0]
    outputs = first.dim() - 2
    if dim % first.dim() != outputs or any(
        (each.shape[:outputs], each.shape[-1]) != (first.shape[:outputs], first.shape[-1]) for each in tensors
    ):
        return None
    return first._of([sum(rows, ()) for rows in zip(*(each.matrices for each in tensors), strict=True)])


def _select(tensor: StoredTensor, dim: int, index: int) -> StoredTensor | None:
    """An expert."""
    if tensor.dim() != 3 or dim != 0:
        return None
    return tensor._of([tensor.matrices[index]], experts=False)


def _transpose(tensor: StoredTensor, first: int = 0, second: int = 1) -> StoredTensor | None:
    last = {tensor.dim() - 2, tensor.dim() - 1}
    if {first % tensor.dim(), second % tensor.dim()} != last:
        return None
    return tensor._of(tensor.matrices, transposed=not tensor.transposed)


def _slice(
    tensor: StoredTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> StoredTensor | None:
    """Some outputs or inputs of its matrices, or some experts."""
    dim %= tensor.dim()
    wanted = slice(*slice(start, end, step).indices(tensor.shape[dim]))
    if wanted == slice(0, tensor.shape[dim], 1):
        return _same(tensor)
    if wanted.start >= wanted.stop:
        return None
    if dim == tensor.dim() - 3:
        return tensor._of(tensor.matrices[wanted])
    if (dim == tensor.dim() - 2) == tensor.transposed:
        parts = [_inputs(rows, wanted) for rows in tensor.matrices]
    else:
        parts = [_outputs(rows, wanted) for rows in tensor.matrices]
    found = [each for each in parts if each is not None]
    return tensor._of(found) if len(found) == len(parts) else None


def _outputs(parts: Sequence[StoredMatrix], wanted: slice) -> list[StoredMatrix] | None:
    if wanted.step != 1 and len(parts) > 1:
        return None
    found, first = [], 0
    for part in parts:
        own = slice(max(0, wanted.start - first), min(part.shape[0], wanted.stop - first), wanted.step)
        if own.start < own.stop:
            found.append(part if own == slice(0, part.shape[0], 1) else part.rows(own))
        first += part.shape[0]
    return found


def _inputs(parts: Sequence[StoredMatrix], wanted: slice) -> list[StoredMatrix] | None:
    if wanted.step != 1:
        return None
    found = [part.columns(wanted) for part in parts]
    kept = [each for each in found if each is not None]
    return kept if len(kept) == len(parts) else None


def _split(tensor: StoredTensor, size: int, dim: int = 0) -> list[StoredTensor] | None:
    parts = [_slice(tensor, dim, at, at + size) for at in range(0, tensor.shape[dim], size)]
    return None if None in parts else parts  # type: ignore[return-value]


def _moved(
    tensor: StoredTensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> StoredTensor | None:
    """On another device."""
    if dtype not in (None, tensor.dtype) or device in (None, tensor.device):
        return None
    return tensor._of([[part.to(device) for part in rows] for rows in tensor.matrices], device=device)


_KEPT: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.stack.default: _stack,
    aten.cat.default: _concatenate,
    aten.select.int: _select,
    aten.transpose.int: _transpose,
    aten.t.default: _transpose,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten._to_copy.default: _moved,
}
