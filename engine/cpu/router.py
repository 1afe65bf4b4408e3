"""The product of a mixture's router over a pack.

Routers hold their weight themselves, and say by functional.linear what they compute with it. torch multiplies
bfloat16 element by element on a CPU without instructions for it: 28 ms for 512 tokens and 128 experts of
width 2048 on one thread, where the packed product takes 5.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from engine.cpu.linear import Matrix, Pack, Packer


class PackedWeight(torch.Tensor):
    """A weight [outputs, inputs] of which functional.linear alone can be computed. Sums are float32, and are
    rounded to bfloat16 once."""

    _pack: Pack

    @staticmethod
    def __new__(cls, weight: torch.Tensor) -> PackedWeight:
        """`weight`: bfloat16."""
        shell = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        made: PackedWeight = torch.Tensor._make_subclass(cls, shell)
        # Routers are never quantised: the experts of a token would change, not a sum.
        outputs, inputs = weight.shape
        made._pack = Packer().pack(outputs, inputs, [Matrix(weight)])
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.linear:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return cls._linear(*args, **(kwargs or {}))

    @staticmethod
    def _linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        pack = weight._pack  # whose sizes cost less to ask for than the tensor's
        offsets = None if bias is None else bias.float()
        out = pack.product(x.reshape(-1, pack.inputs), 0, pack.rows, offsets, torch.bfloat16)
        return out.view(*x.shape[:-1], pack.rows)


def holder_of_weight(router: Any) -> Any:
    """The module that has a router's weight: itself, or Hunyuan's linear layer."""
    return getattr(router, "wg", router)


def pack_router(router: nn.Module) -> None:
    """Pack the weight of one of layer_classes.ROUTERS, in place."""
    holder = holder_of_weight(router)
    weight = holder.weight
    assert isinstance(weight, nn.Parameter)
    del holder.weight
    holder.weight = PackedWeight(weight.detach())
