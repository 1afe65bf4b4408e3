"""The options of an engine."""

from __future__ import annotations

from dataclasses import dataclass, fields

from common.errors import ConfigError
from kvcache.quant import KVFormat

CHOICES = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "attention": ("auto", "cpu", "torch", "flashinfer"),
    "linear": ("auto", "torch", "packed"),
    "weight_dtype": ("auto", "bfloat16", "int8"),
    "kv_cache_dtype": tuple(KVFormat),
}
_OPTIONS = {"attention": "attention_backend", "linear": "linear_backend"}


@dataclass(frozen=True)
class EngineConfig:
    """The engine's options. Raises ConfigError for an invalid value, by the name of the worker's option."""

    model: str  # a directory with config.json and safetensors, or a hub id
    dtype: str = "auto"  # of weights and KV; "auto": that of config.json, or of the files
    weight_dtype: str = "auto"  # of linear layers. "auto": as stored, bfloat16 coded; "int8": rounded at load
    kv_cache_dtype: str = "auto"  # storage format of KV (kvcache.quant); "auto": `dtype`
    generation_config: str = "auto"  # a folder that lists the end tokens; "auto", "vllm": `model` does
    device: str = "cpu"  # a torch device
    attention: str = "auto"  # "auto": flashinfer on CUDA, the C++ op on CPU, else the torch reference
    linear: str = "auto"  # "packed": weights rearranged once for the CPU; "auto": packed in bfloat16 on CPU
    threads: int = 1  # torch's intra-op threads in this process; 0: torch's own default
    overlap: bool = True  # True: forwards run on an executor thread; False: inside launch()

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model", "no model is named", "give a directory or a hub id")
        for field in fields(self):
            allowed = CHOICES.get(field.name)
            value = getattr(self, field.name)
            if allowed and value not in allowed:
                key = _OPTIONS.get(field.name, field.name)
                raise ConfigError(key, f"{value!r} is unknown", f"use one of {', '.join(allowed)}")
        if self.threads < 0:
            raise ConfigError("threads", f"{self.threads} is negative", "use 0 for torch's default")
