"""Loads a checkpoint into a transformers model that uses the paged cache and the paged attention function."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import GenerationConfig
from transformers.utils import cached_file, is_accelerate_available
from transformers.utils import logging as transformers_logging

from common.errors import ConfigError
from common.freed_memory import return_freed_memory
from common.tokenizer_file import tokenizer_json
from engine.attention import ATTENTION_NAME
from engine.attention_layers import AttentionLayer, attention_layers, check_layers
from engine.checkpoint.formats import stored_format
from engine.checkpoint.reader import nothing_divided, plain_dtype, read_weights, weight_files
from engine.checkpoint.samples import WeightSamples
from engine.checkpoint.stored import dequantise_parameters, move_parameters
from engine.config import EngineConfig
from engine.families.base import Dtypes
from engine.gate import check_model
from engine.model_config import read_config
from engine.module_replacements import check_weight_dtype, replacement_table, takes_stored_weights
from engine.parallel.group import RankGroup
from engine.parallel.head import divide_head
from engine.parallel.shard import Shard
from engine.parallel.sums import put_sums
from engine.positions import keep_frequencies, longest_context
from engine.published_names import register_names
from engine.replacement_table import apply_replacements
from engine.row_widths import fitted
from engine.spec import ModelSpec
from engine.text_models import causal_class
from engine.text_part import text_part, text_weights
from kvcache.layout import stored_as
from kvcache.quant import KVFormat

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class LoadedModel:
    """A transformers causal LM with its slow modules replaced, and what its runner needs to know of it."""

    model: Any  # a transformers PreTrainedModel with a causal LM head
    spec: ModelSpec
    attention: tuple[AttentionLayer, ...]  # one per layer that attends, in order
    replaced: dict[str, int]  # class name -> number of modules replaced
    kept: tuple[str, ...]  # formats of the checkpoint in which weights are computed: "fp8", "nvfp4", ...

    @property
    def shared(self) -> dict[int, int]:
        """Layer without keys and values of its own -> the layer whose it reads."""
        return {facts.layer: facts.shares for facts in self.attention if facts.shares is not None}


def load_model(config: EngineConfig, group: RankGroup | None = None) -> LoadedModel:
    """Load `config.model`, a directory or a hub id; with a group, the part of this rank. The spec is always
    of the whole model.

    A directory is not looked up on the hub. Raises ConfigError if there is no usable model there, and
    UnsupportedModel, before any weight is read, if the gate refuses the model. `check_divisible` is for
    groups.
    """
    # When a worker fails to start, the last line of its stderr is the error. Progress bars would hide it.
    transformers_logging.disable_progress_bar()
    register_names()
    local = _is_directory(config.model)
    whole = _config(config, local)
    hf_config = text_part(whole)
    family = check_model(hf_config)
    dtype = _dtype(config, hf_config, local)
    check_weight_dtype(config, dtype)
    shard = None if group is None else Shard(group.rank, group.size)
    samples = WeightSamples()
    model = _read(
        causal_class(family.architecture),
        config,
        hf_config,
        dtype,
        local,
        shard,
        samples,
        is_text_part=hf_config is not whole,
    )
    if group is not None:
        put_sums(model, group)
    move_parameters(model, torch.device(config.device))
    model = model.to(config.device).eval().requires_grad_(False)
    if group is not None:
        divide_head(model, group)
    family.prepare(model)
    keep_frequencies(model)
    of_family = fitted(family.groups(hf_config, Dtypes(model=dtype, kv=dtype)), config)
    groups = stored_as(of_family, KVFormat(config.kv_cache_dtype))
    attention = attention_layers(model, family.shared(hf_config))
    check_layers(groups, attention)
    spec = ModelSpec(
        groups=groups,
        vocab_size=hf_config.vocab_size,
        max_position=longest_context(hf_config),
        eos_token_ids=_eos_token_ids(model, hf_config),
        fingerprint=_fingerprint(samples, hf_config, _weights_name(config, dtype)),
        model_type=hf_config.model_type,
        dtype=dtype,
    )
    kept: set[str] = set()
    replaced = apply_replacements(model, config, replacement_table(config, kept))
    dequantise_parameters(model)
    return LoadedModel(model, spec, attention, replaced, tuple(sorted(kept)))


def check_divisible(config: EngineConfig, ranks: int) -> None:
    """Raises ConfigError, key `tp_size`, if so many ranks cannot divide the model, and like load_model if
    there is none. No weight is read."""
    hf_config = text_part(_config(config, _is_directory(config.model)))
    check_model(hf_config)
    Shard(0, ranks).config(hf_config)


def read_tokenizer(model: str) -> str:
    """The contents of a model's tokenizer.json, or of what stands for it. Raises OSError if it has none, and
    ValueError for one that is not read."""
    if _is_directory(model):
        return tokenizer_json(Path(model))
    return Path(str(cached_file(model, "tokenizer.json"))).read_text("utf-8")


def _read(
    model_class: Any,
    config: EngineConfig,
    hf_config: Any,
    dtype: torch.dtype,
    local: bool,
    shard: Shard | None,
    samples: WeightSamples,
    is_text_part: bool,
) -> Any:
    """The model, or a part of it, with its weights, some of which may be StoredTensors. `is_text_part`: of a
    checkpoint that has more than text.

    With accelerate each weight goes to another device when it is read; without it all are in the host's
    memory first. So are those of a model of which some stay stored: transformers would reserve the GPU's
    memory for all weights dequantised, in one piece, which is not given back while a weight is in it.
    """
    plain = copy.deepcopy(hf_config) if shard is None else shard.config(hf_config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config  # transformers would replace modules, and needs a GPU for some formats
    on_cpu = torch.device(config.device).type == "cpu"
    try:
        form = stored_format(hf_config)
        keep = form is not None and takes_stored_weights(config, dtype)
        direct = not on_cpu and not keep and is_accelerate_available()
        divide = nothing_divided if shard is None else shard.divide(hf_config)
        weights = read_weights(config.model, form, dtype, local, keep, samples, divide)
        if is_text_part:
            weights = text_weights(weights)
            plain.update({"tie_word_embeddings": "lm_head.weight" not in weights})
        model, report = model_class.from_pretrained(
            None,
            config=plain,
            state_dict=weights,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            device_map={"": config.device} if direct else None,
            ignore_mismatched_sizes=True,  # else transformers says by the log alone which they are
            output_loading_info=True,
        )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:  # RuntimeError: parts do not fit
        raise _unreadable(config.model, error) from error
    return_freed_memory()  # of what was dequantised or merged
    if (generation := _generation_config(config, local)) is not None:
        model.generation_config = generation
    # transformers initialises these at random
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise _unreadable(config.model, ValueError(f"no weights for {missing}"))
    for name, stored, wanted in sorted(report["mismatched_keys"]):
        problem = f"{name} is {tuple(stored)}, and by config.json {tuple(wanted)}"
        raise _unreadable(config.model, ValueError(problem))
    return model


def _generation_config(config: EngineConfig, local: bool) -> GenerationConfig | None:
    """None: a checkpoint may have none, and the router refuses other folders. Raises ConfigError."""
    own = config.generation_config in ("auto", "vllm")
    source = config.model if own else config.generation_config
    try:
        return GenerationConfig.from_pretrained(source, local_files_only=local or not own)
    except OSError:
        return None
    except ValueError as error:
        said = " ".join(str(error).split())
        raise ConfigError(
            "generation_config", f"generation_config.json of {source}: {said}", "repair it"
        ) from error


def _config(config: EngineConfig, local: bool) -> Any:
    try:
        return read_config(config.model, local)
    except (OSError, ValueError) as error:
        raise _unreadable(config.model, error) from error


def _is_directory(model: str) -> bool:
    if Path(model).is_dir():
        if not (Path(model) / "config.json").is_file():
            raise ConfigError(
                "model", f"{model} contains no config.json", "name a directory that save_pretrained wrote"
            )
        return True
    if not _HUB_ID.fullmatch(model):
        raise ConfigError("model", f"there is no directory {model}", "name an existing directory or a hub id")
    return False


def _unreadable(model: str, error: Exception) -> ConfigError:
    first_line = str(error).strip().splitlines()[0]
    return ConfigError(
        "model",
        f"{model} cannot be loaded ({first_line})",
        "name a directory with config.json and safetensors",
    )


def _dtype(config: EngineConfig, hf_config: Any, local: bool) -> torch.dtype:
    if config.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.dtype)
        return dtype
    if isinstance(hf_config.dtype, torch.dtype):
        return hf_config.dtype
    try:  # gpt-oss' config.json has none
        return plain_dtype(weight_files(config.model, local))
    except (OSError, ValueError, SafetensorError) as error:
        raise _unreadable(config.model, error) from error


def _eos_token_ids(model: nn.Module, hf_config: Any) -> tuple[int, ...]:
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = hf_config.eos_token_id
    if eos is None:
        return ()
    listed = (eos,) if isinstance(eos, int) else tuple(eos)
    return tuple(token for token in listed if 0 <= token < hf_config.vocab_size)  # others are never sampled


def _weights_name(config: EngineConfig, dtype: torch.dtype) -> str:
    """What the weights are in. Workers with int8 weights and workers without them serve different models."""
    return f"{dtype} int8" if config.weight_dtype == "int8" else str(dtype)


def _fingerprint(samples: WeightSamples, hf_config: Any, weights: str) -> str:
    """Digest of the configuration and of values of every weight."""
    settings = hf_config.to_diff_dict()
    for incidental in ("_name_or_path", "transformers_version", "dtype", "attn_implementation"):
        settings.pop(incidental, None)
    digest = hashlib.sha256(json.dumps([settings, weights], sort_keys=True, default=str).encode())
    samples.digest_into(digest)
    return digest.hexdigest()
