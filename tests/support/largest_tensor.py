"""How large the largest tensor is that operators make."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`values` of the largest tensor that an operator inside this context has made; views are not made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        made = [tensor.numel() for tensor in _tensors(result) if _storage(tensor) not in known]
        self.values = max(self.values, *made, 0)
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    """The storage that a tensor is in: a view is in that of its base."""
    return int(tensor.untyped_storage()._cdata)
