"""How much memory a worker takes for weights and KV, from the files of a model, without loading it.

It imports torch and transformers, so gather.py imports it only when there is a model to look at.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from common.errors import ConfigError
from engine.families.base import Dtypes
from engine.gate import check_model
from kvcache.config import CacheConfig
from kvcache.layout import GroupSpec, stored_as
from kvcache.quant import KVFormat
from worker.options import WorkerOptions

_HEADER_LENGTH = 8  # bytes, in front of the header of a safetensors file
_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2}


def worker_bytes(options: WorkerOptions, directory: Path, free: int | None) -> int:
    """Weights in the dtype that is served, and pools: of `max_total_tokens` tokens, or of the share that the
    worker takes of `free` bytes of this machine. `free` None: it takes what is left of a GPU, maybe nothing.

    Raises ConfigError for a model that cannot be read or is not supported.
    """
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError("model", f"config.json cannot be used: {error}", "repair the checkpoint") from None
    family = check_model(config)
    text = config.get_text_config()
    dtype = _dtype(options, text)
    weights = sum(_weight_bytes(path, dtype) for path in directory.glob("*.safetensors"))
    groups = stored_as(family.groups(config, Dtypes(dtype, dtype)), KVFormat(options.kv_cache_dtype))
    if options.max_total_tokens is not None or free is None:
        return weights + _pool_bytes(options, groups, options.max_total_tokens or 0)
    share = max(0, int((free - weights) * options.kv_memory_fraction))
    most = _pool_bytes(options, groups, options.max_running_requests * text.max_position_embeddings)
    return weights + min(share, most)


def _pool_bytes(options: WorkerOptions, groups: tuple[GroupSpec, ...], tokens: int) -> int:
    pages = tokens // options.page_size
    nbytes = 0.0
    for group in groups:
        size = group.page_bytes(options.page_size)
        ratio = options.swa_full_tokens_ratio if group.kind == "window" else 1.0
        nbytes += size * (_state_slots(options) if group.kind == "state" else pages * ratio)
    return int(nbytes)


def _dtype(options: WorkerOptions, config: Any) -> torch.dtype:
    if options.dtype != "auto":
        named = getattr(torch, options.dtype)
        assert isinstance(named, torch.dtype)
        return named
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32


def _weight_bytes(path: Path, dtype: torch.dtype) -> int:
    """A safetensors file names the type and place of each tensor in a header of JSON."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_HEADER_LENGTH), "little")
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise ConfigError("model", f"{path} is no safetensors file", "copy it again") from None
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    end = max((entry["data_offsets"][1] for entry in tensors), default=0)
    if path.stat().st_size < _HEADER_LENGTH + length + end:
        raise ConfigError("model", f"{path} is shorter than its header says", "copy it again")
    sizes = (
        (entry["data_offsets"][1] - entry["data_offsets"][0], _ITEM_BYTES.get(entry["dtype"]))
        for entry in tensors
    )
    return sum(nbytes if item is None else nbytes // item * dtype.itemsize for nbytes, item in sizes)


def _state_slots(options: WorkerOptions) -> int:
    """As many as worker/capacity.py takes at most: half of them give way where memory is short."""
    if options.max_mamba_cache_size is not None:
        return options.max_mamba_cache_size
    config = CacheConfig(options.page_size, 1, options.max_running_requests, options.page_size)
    return config.num_state_slots
