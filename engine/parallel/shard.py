"""The part of a model that one rank computes.

Heads and the inner width of MLPs are divided among the ranks, as in Megatron-LM (Shoeybi et al., 2019): the
projections into them by outputs, those out of them by inputs. So a part is the same model with fewer heads
and narrower MLPs. What its attention and its MLPs return are summands, and a sum over the ranks follows each
(engine/parallel/sums.py). The rest, embedding, norms and routers of mixtures, is whole in every rank.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError
from engine.checkpoint.reader import Division
from engine.families.dense import head_dim

FAMILIES = (
    *("gemma2", "gemma3_text", "llama", "mistral", "mixtral"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
)
"""The model types that are divided."""

_BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3")
_BY_INPUTS = ("o_proj", "down_proj", "w2")
"""Projections by their names in checkpoints. Those with digits are of Mixtral's experts."""

_DIVIDED = (
    *("num_attention_heads", "num_key_value_heads", "intermediate_size"),
    *("moe_intermediate_size", "shared_expert_intermediate_size"),
)
"""Keys of config.json of which each rank has its share."""


@dataclass(frozen=True)
class Shard:
    """Part `rank` of `size` equal ones."""

    rank: int
    size: int

    def config(self, config: Any) -> Any:
        """The transformers config of the part. Raises ConfigError, key `tp_size`, for a model that is not
        divided, or not into so many."""
        if config.model_type not in FAMILIES:
            raise ConfigError(
                "tp_size",
                f"models of type {config.model_type} are not divided among ranks",
                f"use 1, or one of {', '.join(FAMILIES)}",
            )
        part = copy.deepcopy(config)
        part.head_dim = head_dim(config)
        for key in _DIVIDED:
            whole = getattr(config, key, None)
            if whole is None:
                continue
            if whole % self.size:
                raise ConfigError(
                    "tp_size", f"{key} is {whole} in config.json", f"use a number that divides {whole}"
                )
            setattr(part, key, whole // self.size)
        return part

    def division(self, name: str) -> Division | None:
        """Which part of a checkpoint's weight belongs to this one; None: all of it."""
        stem, _, kind = name.rpartition(".")
        projection = stem.rpartition(".")[2]
        if projection in _BY_OUTPUTS:
            return Division(0, self.rank, self.size)
        if projection in _BY_INPUTS and kind == "weight":
            return Division(1, self.rank, self.size)
        return None
