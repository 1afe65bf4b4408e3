"""The tensors of a checkpoint's safetensors files, each read when transformers asks for it.

Files are read with `pread`, not mapped: a mapped file counts as the process's memory once it was read, which
doubles that of a model whose weights are converted or rearranged after loading.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import safe_open
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from common.start_log import StartProgress
from engine.checkpoint.base import Format, Stored
from engine.checkpoint.samples import WeightSamples
from engine.checkpoint.stored import StoredTensor

_PLAIN = ("F64", "F32", "F16", "BF16")
_SERVED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CODES = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "I8")
"""Numbers that are no weights without a scale. Tensors other than weights may be bytes, words or booleans."""
_OF_ACTIVATIONS = ("input_zero_point", "output_zero_point")
"""Of activations, which stay plain: compressed-tensors stores their zero points as it would store them."""


class Division(NamedTuple):
    """Which part of a weight a rank reads: one of `size` equal ones along a dimension, or of each of its
    `segments`, whose lengths these are."""

    dim: int
    rank: int
    size: int
    segments: tuple[int, ...] = ()

    def of(self, stored: Sliceable, shape: Sequence[int]) -> torch.Tensor:
        """The part of a tensor. Raises ValueError if it has no such parts."""
        parts, first = [], 0
        for length in self.segments or (shape[self.dim],):
            if length % self.size:
                raise ValueError(f"{length} is not divided by {self.size}")
            count = length // self.size
            begin = first + count * self.rank
            parts.append(stored[(slice(None),) * self.dim + (slice(begin, begin + count),)])
            first += length
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


class AddedOnce(NamedTuple):
    """A bias of what is summed over the ranks: only rank 0 has it, and the others zeros."""

    rank: int

    def of(self, stored: Sliceable, shape: Sequence[int]) -> torch.Tensor:
        """The part of a tensor."""
        del shape
        whole = stored[...]
        return whole if self.rank == 0 else torch.zeros_like(whole)


class Sliceable(Protocol):
    """A tensor, or one in a file."""

    def __getitem__(self, index: Any, /) -> torch.Tensor: ...


Divide = Callable[[str], Division | AddedOnce | None]
"""The part of a weight, by its name; None: all of it."""


def nothing_divided(name: str) -> None:
    """Every weight is read whole."""
    del name


class CountedTensor:
    """A tensor of a file; what is read of it counts as progress."""

    def __init__(self, stored: Stored, progress: StartProgress) -> None:
        self._stored = stored
        self._progress = progress

    def get_dtype(self) -> str:
        """safetensors' name of the dtype."""
        return self._stored.get_dtype()

    def get_shape(self) -> list[int]:
        """Of the whole tensor."""
        return self._stored.get_shape()

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor = self._stored[index]
        self._progress.add(tensor.nbytes)
        return tensor


class PlainWeight:
    """A weight that is one tensor of a file, or a part of it."""

    def __init__(
        self, name: str, stored: Stored, samples: WeightSamples, division: Division | AddedOnce | None
    ) -> None:
        self._name = name
        self._stored = stored
        self._samples = samples
        self._division = division

    def __getitem__(self, index: Any) -> torch.Tensor:
        assert index is ..., "weights are read at once"
        if self._division is None:
            whole = self._stored[...]
            self._samples.take(self._name, whole)
            return whole
        self._samples.take_from_file(self._name, self._stored)
        return self._division.of(self._stored, self._stored.get_shape())


class QuantisedWeight:
    """A weight that is put together when it is read."""

    def __init__(
        self,
        name: str,
        form: Format,
        parts: Mapping[str, Stored],
        dtype: torch.dtype,
        keep: bool,
        samples: WeightSamples,
        division: Division | AddedOnce | None,
    ) -> None:
        self._name = name
        self._format = form
        self._parts = parts
        self._dtype = dtype
        self._keep = keep
        self._samples = samples
        self._division = division

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Raises ValueError if the stored tensors do not fit together."""
        assert index is ..., "weights are read at once"
        parts = {suffix: stored[...] for suffix, stored in self._parts.items()}
        try:
            weight = self._format.read(parts, self._dtype)
        except ValueError as error:
            raise ValueError(f"{self._name}: {error}") from error
        self._samples.take(self._name, weight)
        whole = weight if self._keep else weight.dequantised()
        if self._division is None:
            return whole
        part = self._division.of(whole, whole.shape)
        return part.owned() if isinstance(part, StoredTensor) else part.clone()  # so that the whole is freed


def read_weights(
    model: str,
    form: Format | None,
    dtype: torch.dtype,
    local: bool,
    keep: bool,
    samples: WeightSamples | None = None,
    divide: Divide = nothing_divided,
) -> dict[str, PlainWeight | QuantisedWeight]:
    """All weights of `model`, a directory or a hub id, by the names they have when they are not quantised.

    Only headers are read. `local`: nothing is downloaded. Quantised weights are given in `dtype`, others as
    they are stored. `keep`: they are StoredTensors, else dequantised. `samples` takes those of a weight when
    it is read. Raises OSError or SafetensorError for files that are missing or damaged, and ValueError if a
    quantised weight is incomplete.
    """
    samples = samples or WeightSamples()
    stored: dict[str, Stored] = {}
    paths = weight_files(model, local)
    progress = StartProgress("weights read", sum(Path(path).stat().st_size for path in paths))
    for path in paths:
        file = _opened(path)
        names = file.keys()
        stored |= {name: CountedTensor(file.get_slice(name), progress) for name in names}
    quantised: dict[str, QuantisedWeight] = {}
    if form is not None:
        for name, parts in _parts_of_quantised(stored, form).items():
            quantised[name] = QuantisedWeight(name, form, parts, dtype, keep, samples, divide(name))
    for name, weight in stored.items():
        if name.endswith(_OF_ACTIVATIONS):
            continue
        stored_as = weight.get_dtype()
        if stored_as in _CODES or (name.endswith(".weight") and stored_as not in _PLAIN):
            lacks = "quantization_config in config.json" if form is None else form.parts[0]
            raise ValueError(f"{name} is stored as {stored_as}, without {lacks}")
    plain = {name: PlainWeight(name, tensor, samples, divide(name)) for name, tensor in stored.items()}
    return {**plain, **quantised}


def _parts_of_quantised(stored: dict[str, Stored], form: Format) -> dict[str, dict[str, Stored]]:
    """Take the tensors of quantised weights out of `stored`: by the weight's name and their suffix."""
    weights: dict[str, dict[str, Stored]] = {}
    for other, suffix in form.renamed:
        for stem in [name.removesuffix(other) for name in stored if name.endswith(other)]:
            if stem + form.numbers in stored and stem + suffix not in stored:
                stored[stem + suffix] = stored.pop(stem + other)
    for name in [name for name in stored if name.endswith(form.parts[0])]:
        stem = name.removesuffix(form.parts[0])
        parts = {suffix: stored.pop(stem + suffix, None) for suffix in (*form.parts, *form.optional)}
        missing = [stem + suffix for suffix in form.parts if parts[suffix] is None]
        if missing:
            raise ValueError(f"{name} is there, but not {', '.join(missing)}")
        weights[stem + form.result] = {suffix: part for suffix, part in parts.items() if part is not None}
    return weights


def _opened(path: str | Path) -> Any:
    return safe_open(path, framework="pt", backend="pread")


def plain_dtype(paths: Iterable[str | Path]) -> torch.dtype:
    """The dtype of most bytes of plain numbers in these files; float32 if there are none.

    Only headers are read. Raises OSError or SafetensorError for files that are missing or damaged.
    """
    numbers: Counter[torch.dtype] = Counter()
    for path in paths:
        file = _opened(path)
        for tensor in map(file.get_slice, file.keys()):
            if dtype := _SERVED.get(tensor.get_dtype()):
                numbers[dtype] += math.prod(tensor.get_shape()) * dtype.itemsize
    return max(numbers, key=numbers.__getitem__, default=torch.float32)


def weight_files(model: str, local: bool) -> list[str]:
    """The paths of the checkpoint's files, downloaded if they must be.

    One file is preferred to shards, as transformers does. Raises OSError if there is neither, and ValueError
    for an index that is damaged.
    """
    found = partial(cached_file, model, local_files_only=local, _raise_exceptions_for_missing_entries=False)
    if (whole := found("model.safetensors")) is not None:
        return [whole]
    if (index := found("model.safetensors.index.json")) is None:
        if not local:  # raises unless the file has come meanwhile; says whether there was a connection
            cached_file(model, "model.safetensors")
        raise OSError(f"{model} has neither model.safetensors nor model.safetensors.index.json")
    if local:
        names = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
        return [str(Path(index).parent / name) for name in names]
    return list(get_checkpoint_shard_files(model, index, local_files_only=local)[0])
