"""Linear layers whose weights are packed once. linear.h describes the formats."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from engine.checkpoint.grouped import GroupedMatrix
from engine.checkpoint.mxfp4 import Mxfp4Matrix
from engine.checkpoint.nvfp4 import Nvfp4Matrix
from engine.checkpoint.scaled import ScaledMatrix
from engine.checkpoint.stored import StoredMatrix, StoredTensor
from engine.cpu.op import KernelsUnavailable, current_isa, kernels
from engine.cpu.threads import kernel_threads
from kvcache.buffers import allocate_private

GROUP = 16
"""The number of outputs in one line of a pack."""
BLOCK_INPUTS = 128
"""The inputs that share a scale in a pack of fp8 (linear_expanded.h: kBlockInputs)."""
CODING_ISAS = ("avx512_vnni", "avx512_bf16")
"""The instruction sets for which weights of bfloat16 are coded: few rows gain, and many lose nothing.

AVX2 decodes a block in memory first, and loses. With AMX it has not been measured.
"""


def check_packable() -> None:
    """Raises KernelsUnavailable, with the reason, if this CPU cannot compute packed products."""
    if current_isa() == "base":
        raise KernelsUnavailable("packed linear layers need a CPU with AVX2")


def packable(weight: torch.Tensor) -> bool:
    """Whether a weight [outputs, inputs] can be packed."""
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.shape[1] % 32 == 0


class PackFormat(enum.IntEnum):
    """What a pack holds, by the kernels' numbers (linear.h: PackFormat).

    CODED_BFLOAT16 has the bits of BFLOAT16, in 12.25 bits a weight (linear_coded.h).
    """

    BFLOAT16 = 0
    INT8 = 1
    FP8 = 2
    MXFP4 = 3
    NVFP4 = 4
    INT4_BY_128 = 5
    INT4_BY_32 = 6
    CODED_BFLOAT16 = 7

    @property
    def of_checkpoint(self) -> str | None:
        """The name of the checkpoints' format, if this is one."""
        name = self.name.lower().partition("_")[0]
        return name if PackFormat.FP8 <= self < PackFormat.CODED_BFLOAT16 else None

    def group_bytes(self, inputs: int) -> int:
        """The bytes of GROUP outputs."""
        size: int = kernels().baton_group_bytes(self, inputs)
        return size


_INT4_INPUTS = {PackFormat.INT4_BY_128: 128, PackFormat.INT4_BY_32: 32}
"""That share a scale and a zero point."""


class Weights(ctypes.Structure):
    """`baton::Weights` in linear.h."""

    _fields_ = (("pack", ctypes.c_void_p), ("scales", ctypes.c_void_p), ("format", ctypes.c_int32))


@dataclass(frozen=True)
class Matrix:
    """A weight [outputs, inputs] that goes to group `group` of a pack and every `step`-th group after it."""

    weight: torch.Tensor
    group: int = 0
    step: int = 1

    @property
    def stored(self) -> StoredMatrix | None:
        """How a checkpoint stored it, if it is still so."""
        if not isinstance(self.weight, StoredTensor) or self.weight.transposed:
            return None
        parts = self.weight.matrices[0]
        return parts[0] if len(parts) == 1 else None

    @property
    def form(self) -> PackFormat:
        """The format that has it bit for bit."""
        stored = self.stored
        if isinstance(stored, Mxfp4Matrix):
            return PackFormat.MXFP4
        if isinstance(stored, Nvfp4Matrix):
            return PackFormat.NVFP4
        if isinstance(stored, ScaledMatrix) and stored.numbers.dtype == torch.float8_e4m3fn:
            return PackFormat.FP8
        if isinstance(stored, GroupedMatrix) and stored.bits == 4:
            for form, inputs in _INT4_INPUTS.items():
                if stored.by_inputs(inputs) is not None:
                    return form
        return PackFormat.BFLOAT16


class Pack:
    """A packed weight with `rows` outputs and `inputs` inputs, in huge pages of its own.

    INT8 has a float32 scale for each output (symmetric), and its products round their left side, too
    (linear_int8.h). All others have each bit of a weight: of bfloat16, or as a checkpoint stored it
    (linear_expanded.h).
    """

    def __init__(self, rows: int, inputs: int, form: PackFormat = PackFormat.BFLOAT16) -> None:
        self.rows = rows
        self.inputs = inputs
        self.form = form
        groups = -(-rows // GROUP)
        self._group_bytes = form.group_bytes(inputs)
        self._buffer = allocate_private(groups * self._group_bytes)
        self._scales = torch.empty(groups * GROUP) if form is PackFormat.INT8 else None

    @property
    def address(self) -> int:
        """The address of the first line."""
        return self._buffer.tensor.data_ptr()

    def weights(self, first: int = 0) -> Weights:
        """The address of output `first`, a multiple of GROUP, and of its scale."""
        assert first % GROUP == 0
        scales = None if self._scales is None else self._scales.data_ptr() + 4 * first
        return Weights(self.address + first // GROUP * self._group_bytes, scales, self.form)

    def put(self, matrix: Matrix) -> bool:
        """Pack a matrix. False: this pack's format does not have it, bit for bit, and the pack is void."""
        assert packable(matrix.weight)
        outputs, inputs = matrix.weight.shape
        assert inputs == self.inputs
        to = (matrix.group, matrix.step, kernel_threads())
        if self.form.of_checkpoint is not None:
            assert matrix.form is self.form
            return self._put_stored(matrix.stored, to)
        source = matrix.weight.detach().contiguous()
        shape = (source.data_ptr(), outputs, inputs)
        if self.form is PackFormat.CODED_BFLOAT16:
            return bool(kernels().baton_pack_coded(*shape, self.address, *to))
        if self._scales is None:
            kernels().baton_pack(*shape, self.address, *to)
        else:
            kernels().baton_pack_int8(*shape, self.address, self._scales.data_ptr(), *to)
        return True

    def _put_stored(self, stored: StoredMatrix | None, to: tuple[int, int, int]) -> bool:
        if isinstance(stored, ScaledMatrix):
            scales = stored.input_scales(BLOCK_INPUTS)
            if scales is None:
                return False
            numbers = stored.numbers
            assert numbers.stride(1) == 1
            source = (numbers.data_ptr(), numbers.stride(0), scales.data_ptr(), *numbers.shape)
            return bool(kernels().baton_pack_fp8(*source, self.address, *to))
        if isinstance(stored, GroupedMatrix):
            return self._put_int4(stored, to)
        assert isinstance(stored, Mxfp4Matrix | Nvfp4Matrix)
        codes, scales = stored.codes.flatten(1), stored.scales
        assert codes.stride(1) == scales.stride(1) == 1
        source = (codes.data_ptr(), codes.stride(0), scales.data_ptr(), scales.stride(0))
        if isinstance(stored, Nvfp4Matrix):
            factor = float(stored.factor)
            return bool(kernels().baton_pack_nvfp4(*source, factor, *stored.shape, self.address, *to))
        return bool(kernels().baton_pack_mxfp4(*source, *stored.shape, self.address, *to))

    def _put_int4(self, stored: GroupedMatrix, to: tuple[int, int, int]) -> bool:
        inputs = _INT4_INPUTS[self.form]
        found = stored.by_inputs(inputs)
        assert found is not None
        scales, zeros, codes = found[0].float().contiguous(), found[1].contiguous(), stored.codes
        assert codes.stride(1) == 1
        source = (codes.data_ptr(), codes.stride(0), scales.data_ptr(), zeros.data_ptr(), inputs)
        return bool(kernels().baton_pack_int4(*source, *stored.shape, self.address, *to))

    def unpacked(self, outputs: torch.Tensor) -> torch.Tensor:
        """The weights of outputs [n], int64, as bfloat16 [n, inputs]. Raises IndexError."""
        if any(not 0 <= output < self.rows for output in outputs.tolist()):
            raise IndexError(f"the outputs are 0 to {self.rows - 1}")
        assert self.form.of_checkpoint is None
        outputs = outputs.contiguous()
        out = torch.empty(len(outputs), self.inputs, dtype=torch.bfloat16)
        weights = self.weights()
        kernels().baton_unpack(
            *(ctypes.byref(weights), self.inputs, outputs.data_ptr(), len(outputs), out.data_ptr()),
            kernel_threads(),
        )
        return out

    def product(
        self,
        x: torch.Tensor,
        first: int,
        count: int,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """x [rows, inputs] bfloat16 times outputs [first, first + count) -> [rows, count].

        `first` is a multiple of GROUP; `bias` is float32 [count]. Sums are float32 and are rounded once, to
        `out_dtype`: float32 or bfloat16.
        """
        assert out_dtype in (torch.float32, torch.bfloat16)
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(len(x), count, dtype=out_dtype)
        weights = self.weights(first)
        kernels().baton_linear(
            x.data_ptr(),
            x.stride(0),
            len(x),
            ctypes.byref(weights),
            self.inputs,
            count,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            out_dtype == torch.bfloat16,
            kernel_threads(),
        )
        return out


class Packer:
    """Packs the weights of one model in the format that its options and its checkpoint ask for."""

    def __init__(self, weight_dtype: str = "auto", kept: set[str] | None = None) -> None:
        """`weight_dtype` as in EngineConfig. A pack in a format of the checkpoint adds its name to `kept`."""
        self._weight_dtype = weight_dtype
        self._kept = set() if kept is None else kept

    def pack(self, rows: int, inputs: int, matrices: Sequence[Matrix]) -> Pack:
        """A pack of `rows` outputs with these matrices."""
        pack = Pack(rows, inputs, self._form(inputs, matrices))
        if not all(pack.put(matrix) for matrix in matrices):
            pack = Pack(rows, inputs)
            for matrix in matrices:
                pack.put(matrix)
        if pack.form.of_checkpoint is not None:
            self._kept.add(pack.form.of_checkpoint)
        return pack

    def _form(self, inputs: int, matrices: Sequence[Matrix]) -> PackFormat:
        if self._weight_dtype == "int8":
            return PackFormat.INT8
        forms = {matrix.form for matrix in matrices}
        if self._weight_dtype == "bfloat16":
            return PackFormat.BFLOAT16
        form = forms.pop() if len(forms) == 1 else PackFormat.BFLOAT16
        if form is PackFormat.BFLOAT16 and current_isa() in CODING_ISAS:
            return min(form, PackFormat.CODED_BFLOAT16, key=lambda form: form.group_bytes(inputs))
        return form


class PackedLinear(nn.Module):
    """Replaces an nn.Linear with bfloat16 weights.

    The input is bfloat16; sums are float32 and are rounded to `out_dtype`.
    """

    def __init__(
        self, linear: nn.Linear, out_dtype: torch.dtype = torch.bfloat16, packer: Packer | None = None
    ) -> None:
        super().__init__()
        packer = packer or Packer()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._out_dtype = out_dtype
        self.pack = packer.pack(linear.out_features, linear.in_features, [Matrix(linear.weight)])
        self._bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs]."""
        rows = x.reshape(-1, self.in_features)
        out = self.pack.product(rows, 0, self.out_features, self._bias, self._out_dtype)
        return out.reshape(*x.shape[:-1], self.out_features)


class PackedEmbedding(nn.Module):
    """Replaces an nn.Embedding that is tied to a packed layer, whose pack holds the only copy."""

    def __init__(self, pack: Pack) -> None:
        super().__init__()
        self._pack = pack

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[...] -> bfloat16 [..., inputs]. Raises IndexError."""
        return self._pack.unpacked(ids.flatten()).reshape(*ids.shape, self._pack.inputs)
