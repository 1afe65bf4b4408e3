"""How much memory a worker takes for weights and KV, from the files of a model, without loading it.

It imports torch and transformers, so gather.py imports it only when there is a model to look at.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError

from common.errors import ConfigError
from engine.checkpoint.base import Format
from engine.checkpoint.formats import stored_format
from engine.checkpoint.reader import plain_dtype, weight_files
from engine.families.base import Dtypes
from engine.gate import check_model
from engine.model_config import read_config
from engine.parallel.shard import Shard
from engine.positions import longest_context
from engine.text_part import text_part, text_weights
from kvcache.config import CacheConfig
from kvcache.layout import GroupSpec, stored_as
from kvcache.quant import KVFormat
from worker.options import WorkerOptions

_HEADER_LENGTH = 8  # bytes, in front of the header of a safetensors file
_FLOAT_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}


def worker_bytes(options: WorkerOptions, directory: Path, free: int | None) -> int:
    """Weights as they are served, and pools: of `max_total_tokens` tokens, or of the share that the
    worker takes of `free` bytes of this machine. `free` None: it takes what is left of a GPU, maybe nothing.

    Raises ConfigError for a model that cannot be read, is not supported, or not divided as it should be.
    """
    try:
        whole = read_config(directory, local=True)
    except (OSError, ValueError) as error:
        raise ConfigError("model", f"config.json cannot be used: {error}", "repair the checkpoint") from None
    config = text_part(whole)
    family = check_model(config)
    if options.tp_size > 1:
        Shard(0, options.tp_size).config(config)
    dtype = _dtype(options, config, directory)
    served = _Served(dtype, stored_format(config), _keeps(options, dtype, free is None), options.weight_dtype)
    tensors = {tensor.name: tensor for path in _files(directory) for tensor in _tensors(path)}
    if config is not whole:
        tensors = text_weights(tensors)
    weights = sum(served.nbytes(*tensor) for tensor in tensors.values())
    groups = stored_as(family.groups(config, Dtypes(dtype, dtype)), KVFormat(options.kv_cache_dtype))
    if options.max_total_tokens is not None or free is None:
        return weights + _pool_bytes(options, groups, options.max_total_tokens or 0)
    share = max(0, int((free - weights) * options.kv_memory_fraction))
    most = _pool_bytes(options, groups, options.max_running_requests * longest_context(config))
    return weights + min(share, most)


def _files(directory: Path) -> list[Path]:
    """Those that a worker reads: a directory may have the same weights in other files, too."""
    try:
        return [Path(path) for path in weight_files(str(directory), local=True)]
    except (OSError, ValueError) as error:
        raise ConfigError("model", f"its weights cannot be read: {error}", "repair the checkpoint") from None


def _pool_bytes(options: WorkerOptions, groups: tuple[GroupSpec, ...], tokens: int) -> int:
    pages = tokens // options.page_size
    nbytes = 0.0
    for group in groups:
        size = group.page_bytes(options.page_size)
        ratio = (options.swa_full_tokens_ratio or group.window_ratio) if group.kind == "window" else 1.0
        nbytes += size * (_state_slots(options) if group.kind == "state" else pages * ratio)
    return int(nbytes)


def _dtype(options: WorkerOptions, config: Any, directory: Path) -> torch.dtype:
    if options.dtype != "auto":
        named = getattr(torch, options.dtype)
        assert isinstance(named, torch.dtype)
        return named
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    files = _files(directory)
    try:
        return plain_dtype(files)
    except (OSError, SafetensorError) as error:
        raise ConfigError("model", f"its weights cannot be read: {error}", "repair the checkpoint") from None


def _keeps(options: WorkerOptions, dtype: torch.dtype, on_gpu: bool) -> bool:
    """Whether the worker's kernels, if there are any, multiply weights as the checkpoint stores them."""
    kept = (torch.bfloat16, torch.float16) if on_gpu else (torch.bfloat16,)
    return options.weight_dtype == "auto" and options.linear_backend != "torch" and dtype in kept


class _Tensor(NamedTuple):
    """An entry of a safetensors file."""

    name: str
    dtype: str
    dimensions: int
    stored: int  # bytes


def _tensors(path: Path) -> Iterator[_Tensor]:
    """A safetensors file names the type and place of each tensor in a header of JSON."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_HEADER_LENGTH), "little")
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise ConfigError("model", f"{path} is no safetensors file", "copy it again") from None
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if path.stat().st_size < _HEADER_LENGTH + length + end:
        raise ConfigError("model", f"{path} is shorter than its header says", "copy it again")
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        yield _Tensor(name, entry["dtype"], len(entry["shape"]), last - first)


class _Served(NamedTuple):
    """How weights are in a worker's memory. What a kernel does not take, such as groups of inputs that are
    not neighbours, is in `dtype` all the same."""

    dtype: torch.dtype
    form: Format | None  # of the checkpoint
    keeps: bool
    weight_dtype: str

    def nbytes(self, name: str, dtype: str, dimensions: int, stored: int) -> int:
        """Of a tensor of the checkpoint, once it is loaded."""
        itemsize = self.dtype.itemsize
        if dimensions > 1 and "embed" not in name and self.weight_dtype == "int8":
            itemsize = 1
        form = self._format_of(name, dtype)
        if form is None:
            return stored // _FLOAT_BYTES[dtype] * itemsize if dtype in _FLOAT_BYTES else stored
        is_pairs = dtype == form.pairs
        if self.keeps and (is_pairs or dtype != "I8") and (form.bits, dtype) != (8, "I32"):
            return stored
        bits = 4 if is_pairs else form.bits
        return stored * 8 // bits * itemsize if name.endswith(form.numbers) else 0

    def _format_of(self, name: str, dtype: str) -> Format | None:
        """None unless it is a part of a quantised weight. `.weight` may also be a whole weight, of floats."""
        form = self.form
        if form is None:
            return None
        others = (other for other, _ in form.renamed)
        if not name.endswith((*form.parts, *form.optional, *others)):
            return None
        return None if name.endswith(form.numbers) and dtype in _FLOAT_BYTES else form


def _state_slots(options: WorkerOptions) -> int:
    """As many as worker/capacity.py takes at most: half of them give way where memory is short."""
    if options.max_mamba_cache_size is not None:
        return options.max_mamba_cache_size
    config = CacheConfig(options.page_size, 1, options.max_running_requests, options.page_size)
    return config.num_state_slots
