"""A CUDA device without one: tensors that have a shape and a device and no values, on torch's CPU build.

torch's FakeTensorMode raises when an operator mixes devices and when the host asks for a value. FakeCuda, on
top of it, gives kernels to what needs CUDA even so, and finds what would be slow or wrong on a real device:

    wait        the host waits for the device: item, tolist, a copy that blocks, nonzero
    pageable    a copy from or to host memory that is not pinned
    device      an operator over tensors on two devices
    host        an operator that computes on the CPU in what is captured
    shape       a shape that depends on values, in what is captured
    address     what is captured reads memory that another step does not find at the same place
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Generic
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from engine.checkpoint.stored import StoredTensor
from engine.graphs import Computed

aten = torch.ops.aten

_COPIES = ("aten::copy_", "aten::_to_copy", "aten::to")
_BY_VALUE = ("aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::bincount")
_BY_NAME = {"__invert__": aten.bitwise_not.default}
_RANDOM = {"uniform_", "normal_", "exponential_", "random_", "bernoulli_"}


class GpuFault(AssertionError):
    """Something that a real device would punish, or refuse."""


class FakeCuda:
    """Fake CUDA tensors inside this context. `seen` counts what the checks looked at."""

    def __init__(self) -> None:
        self.is_capturing = False
        self.captured: dict[int, torch.Tensor] = {}  # by storage: what is captured read from outside
        self.seen: dict[str, int] = {"operators": 0, "captured operators": 0, "copies": 0}
        self._pinned: dict[int, torch.Tensor] = {}  # by storage; kept alive, so that no address comes twice
        self._made: dict[int, torch.Tensor] = {}  # by storage: made by what is being captured
        self._stack = ExitStack()

    def __enter__(self) -> FakeCuda:
        enter = self._stack.enter_context
        enter(patch.object(torch.cuda, "Event", _FakeEvent))
        enter(patch.object(torch.cuda, "Stream", _FakeStream))
        enter(patch.object(torch.cuda, "stream", lambda _stream: nullcontext()))
        enter(patch.object(torch.cuda, "device", lambda _device: nullcontext()))
        enter(patch.object(torch.cuda, "get_device_capability", lambda _device=None: (9, 0)))
        enter(FakeTensorMode(allow_non_fake_inputs=True))
        enter(_Operators(self))
        enter(_Functions(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def capturing(self) -> Iterator[dict[int, torch.Tensor]]:
        """What runs inside is captured. Gives what it reads that it did not make."""
        self.is_capturing, self._made, self.captured = True, {}, {}
        try:
            yield self.captured
        finally:
            self.is_capturing = False

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note that this host tensor is pinned."""
        self._pinned[_storage(tensor)] = tensor
        return tensor

    def check_copy(self, source: torch.Tensor, target: torch.device, into: Any, blocks: bool) -> None:
        """A copy between host and device. `into` is the tensor that it fills, if that exists already."""
        if source.device.type == target.type:
            return
        self.seen["copies"] += 1
        to_host = target.type == "cpu"
        host = into if to_host else source
        direction = "to the host" if to_host else "to the device"
        if self.is_capturing:
            raise GpuFault(f"host: a copy {direction} in what is captured")
        if host is None or _storage(host) not in self._pinned:
            raise GpuFault(f"pageable: a copy {direction} of {tuple(source.shape)} through memory not pinned")
        if blocks:
            raise GpuFault(f"wait: a copy {direction} of {tuple(source.shape)} that blocks")

    def see(self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """An operator ran."""
        self.seen["operators"] += 1
        if not self.is_capturing:
            return
        self.seen["captured operators"] += 1
        for tensor in inputs:
            if tensor.device.type == "cpu" and tensor.ndim:
                raise GpuFault(f"host: {name} in what is captured reads {tuple(tensor.shape)} on the CPU")
            if tensor.device.type == "cuda" and _storage(tensor) not in self._made:
                self.captured.setdefault(_storage(tensor), tensor)
        for tensor in outputs:
            if tensor.device.type == "cpu" and tensor.ndim:
                raise GpuFault(f"host: {name} in what is captured makes {tuple(tensor.shape)} on the CPU")
            if _storage(tensor) not in self.captured:
                self._made[_storage(tensor)] = tensor


class _FakeEvent:
    def __init__(self, **_: object) -> None:
        self.records = 0

    def record(self, stream: _FakeStream | None = None) -> None:  # noqa: ARG002
        self.records += 1

    def synchronize(self) -> None:
        """Done at once: it is the event of a copy that is two steps old."""

    def query(self) -> bool:
        return True


class _FakeStream:
    def __init__(self, device: torch.device) -> None:
        self.device = device


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator on its way to FakeTensorMode."""

    def __init__(self, device: FakeCuda) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().split(".")[0]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_device = any(tensor.device.type == "cuda" for tensor in inputs)
        if name in _COPIES:
            self._copy(name, args, kwargs)
        if name in _BY_VALUE and on_device:
            kind = "shape" if self._device.is_capturing else "wait"
            raise GpuFault(f"{kind}: {name} gives a shape that depends on values")
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise GpuFault(f"wait: the host asks for a value ({error})") from error
        except RuntimeError as error:
            if "Device Propagation" in str(error):
                raise GpuFault(f"device: {name}: {error}") from error
            if "support for cuda" not in str(error):
                raise
            result = _shaped(func, args, kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if not name.startswith("prim"):
            self._device.see(name, inputs, outputs)
        return result

    def _copy(self, name: str, args: Any, kwargs: Any) -> None:
        if name == "aten::copy_":
            into, source = args[0], args[1]
            blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            self._device.check_copy(source, into.device, into, blocks)
            return
        target = next(
            (x for x in (*args[1:], *kwargs.values()) if isinstance(x, torch.device)),
            args[1].device if len(args) > 1 and isinstance(args[1], torch.Tensor) else args[0].device,
        )
        self._device.check_copy(args[0], target, None, not kwargs.get("non_blocking", False))


def _shaped(func: Any, args: Any, kwargs: Any) -> Any:
    """The results of an operator that has no fake kernel without CUDA, from their shapes."""

    def meta(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device("meta")
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")

    with unset_fake_temporarily():
        shapes = func(*tree_map(meta, args), **tree_map(meta, kwargs))
    return tree_map(
        lambda leaf: torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cuda"), shapes
    )


class _Functions(TorchFunctionMode):
    """Calls whose Python binding reaches for CUDA. Their operators, called by name, do not."""

    def __init__(self, device: FakeCuda) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "pin_memory":
            return self._device.pin(torch.empty_like(args[0]))
        if name == "empty" and kwargs.get("pin_memory"):
            return self._device.pin(func(*args, **{**kwargs, "pin_memory": False}))
        tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if tensor is None:
            return func(*args, **kwargs)
        if name in ("to", "cuda") and (moved := self._moved(name, args, kwargs)) is not None:
            return moved
        if tensor.device.type != "cuda":
            return func(*args, **kwargs)
        if name == "copy_":
            return aten.copy_.default(*args, **kwargs)
        if name == "contiguous":
            form = torch.contiguous_format
            return tensor if tensor.is_contiguous() else aten.clone.default(tensor, memory_format=form)
        if name == "__getitem__":
            return self._item(tensor, args[1])
        if name == "__setitem__":
            return self._set_item(tensor, args[1], args[2])
        if name in _RANDOM:
            self._device.see(name, [tensor], [tensor])
            return tensor
        if name in _BY_NAME:
            return _BY_NAME[name](*args, **kwargs)
        return func(*args, **kwargs)

    def _moved(self, name: str, args: Any, kwargs: Any) -> torch.Tensor | None:
        """The copy of a host tensor on the device; None if this is no such copy."""
        given = (*args[1:], *kwargs.values())
        wanted = [x for x in given if isinstance(x, str | torch.device)]
        target = torch.device(wanted[0]) if wanted else torch.device("cuda" if name == "cuda" else "cpu")
        if target.type != "cuda" or args[0].device.type != "cpu":
            return None
        dtype = next((x for x in given if isinstance(x, torch.dtype)), args[0].dtype)
        non_blocking = kwargs.get("non_blocking", False)
        moved: torch.Tensor = aten._to_copy.default(
            args[0], dtype=dtype, device=target, non_blocking=non_blocking
        )
        return moved

    def _item(self, tensor: torch.Tensor, index: Any) -> torch.Tensor:
        view, by_tensors = _basic(tensor, index)
        if not any(part is not None for part in by_tensors):
            return view
        self._check_index(by_tensors, reads=True)
        item: torch.Tensor = aten.index.Tensor(view, by_tensors)
        return item

    def _set_item(self, tensor: torch.Tensor, index: Any, value: Any) -> None:
        view, by_tensors = _basic(tensor, index)
        if not any(part is not None for part in by_tensors):
            aten.copy_.default(view, value) if isinstance(value, torch.Tensor) else view.fill_(value)
            return
        self._check_index(by_tensors, reads=False)
        if not isinstance(value, torch.Tensor):
            value = torch.full((), value, dtype=tensor.dtype, device="cuda")
        aten.index_put_.default(view, by_tensors, value)

    def _check_index(self, by_tensors: list[torch.Tensor | None], reads: bool) -> None:
        for index in by_tensors:
            if index is None:
                continue
            if index.dtype == torch.bool and reads:
                kind = "shape" if self._device.is_capturing else "wait"
                raise GpuFault(f"{kind}: a mask as an index gives a shape that depends on values")
            if index.device.type != "cuda" and index.ndim:
                raise GpuFault(
                    f"pageable: an index {tuple(index.shape)} on the CPU of a tensor on the device"
                )


def _basic(tensor: torch.Tensor, index: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Apply integers, slices, None and ... as views. Returns the view, and by dimension the tensors (or
    lists) that index it."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is Ellipsis for part in parts):
        at = next(i for i, part in enumerate(parts) if part is Ellipsis)
        given = sum(_dims(part) for part in parts if part is not Ellipsis)
        parts[at : at + 1] = [slice(None)] * (tensor.ndim - given)
    by_tensors: list[torch.Tensor | None] = []
    dim = 0
    for part in parts:
        if part is None:
            tensor = aten.unsqueeze.default(tensor, dim)
        elif isinstance(part, slice):
            if part != slice(None):
                tensor = aten.slice.Tensor(tensor, dim, part.start, part.stop, part.step or 1)
        elif isinstance(part, torch.Tensor | list):
            by_tensors += [None] * (dim - len(by_tensors))
            by_tensors.append(part if isinstance(part, torch.Tensor) else torch.tensor(part))
            dim += _dims(part)
            continue
        else:
            tensor = aten.select.int(tensor, dim, int(part))
            continue
        dim += 1
    return tensor, by_tensors


def _dims(part: Any) -> int:
    """How many dimensions a part of an index consumes."""
    if part is None:
        return 0
    return part.ndim if isinstance(part, torch.Tensor) and part.dtype == torch.bool else 1


class FakeRecorder:
    """A Recorder of FakeCuda. A replay captures the step again: it must read the same memory."""

    def __init__(self, device: FakeCuda) -> None:
        self.device = device
        self.replays = 0

    def record(self, step: Callable[[], Computed]) -> _FakeGraph[Computed]:
        with self.device.capturing() as read:
            outputs = step()
        return _FakeGraph(self, step, dict(read), outputs)


class _FakeGraph(Generic[Computed]):
    def __init__(
        self,
        recorder: FakeRecorder,
        step: Callable[[], Computed],
        read: dict[int, torch.Tensor],
        outputs: Computed,
    ) -> None:
        self._recorder, self._step, self._read = recorder, step, read
        self.outputs = outputs

    def replay(self) -> None:
        self._recorder.replays += 1
        with self._recorder.device.capturing() as read:
            self._step()
        moved = [tuple(tensor.shape) for storage, tensor in read.items() if storage not in self._read]
        if moved:
            raise GpuFault(f"address: what was captured does not read {moved}, which this step made")


def on_fake_cuda(module: torch.nn.Module) -> None:
    """Replace every tensor that a module holds by a fake one on CUDA. Inside FakeCuda."""
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, StoredTensor):
            return torch.nn.Parameter(_stored_on_cuda(tensor), requires_grad=False)
        if id(tensor) not in made:
            like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            made[id(tensor)] = torch.nn.Parameter(like, requires_grad=False) if is_parameter else like
        return made[id(tensor)]

    for part in module.modules():
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers, part.__dict__)
        for held in tables:
            for name, value in list(held.items()):
                if isinstance(value, torch.Tensor):
                    held[name] = fake(value)


def _stored_on_cuda(weight: StoredTensor) -> StoredTensor:
    """A weight whose stored numbers are fake ones on CUDA."""

    def fake(part: Any) -> Any:
        tensors = {name: value for name, value in vars(part).items() if isinstance(value, torch.Tensor)}
        like = {
            name: torch.empty(each.shape, dtype=each.dtype, device="cuda") for name, each in tensors.items()
        }
        return dataclasses.replace(part, **like)

    return StoredTensor(
        [[fake(part) for part in rows] for rows in weight.matrices],
        weight.dtype,
        experts=weight.dim() == 3,
        transposed=weight.transposed,
        device=torch.device("cuda"),
    )


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
