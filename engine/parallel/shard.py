"""The part of a model that one rank computes.

Heads and the inner width of MLPs are divided among the ranks, as in Megatron-LM (Shoeybi et al., 2019): the
projections into them by outputs, those out of them by inputs. So a part is the same model with fewer heads
and narrower MLPs. What its attention and its MLPs return are summands, and a sum over the ranks follows each
(engine/parallel/sums.py). The projection onto the vocabulary is divided by tokens (engine/parallel/head.py).
The rest is whole in every rank: embedding, norms, routers of mixtures, projections into and out of latents,
and layers of linear attention or Mamba, which every rank computes. Of fewer KV heads than ranks, each belongs
to several ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError
from engine.checkpoint.reader import AddedOnce, Divide, Division
from engine.families.dense import head_dim

_INTO = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3")  # w: Mixtral's experts
_OUT_OF = ("o_proj", "down_proj", "w2")
_ONCE = -1  # in the place of a dimension: AddedOnce

Dimensions = Mapping[str, int | None]
"""The last two parts of a weight's name in a checkpoint, or the last three, which come first -> the dimension
that is divided; None: none is."""

_COMMON: Dimensions = {
    **{f"{name}.{kind}": 0 for name in _INTO for kind in ("weight", "bias")},
    **{f"{name}.weight": 1 for name in _OUT_OF},
}
_DEEPSEEK: Dimensions = {"q_b_proj.weight": 0, "kv_b_proj.weight": 0}
_SINKS: Dimensions = {"self_attn.sinks": 0}
_COMPRESSED: Dimensions = {  # by the published names, and by transformers'
    **{"attn.wq_b.weight": 0, "wo_a.weight": 0, "wo_b.weight": 1, "attn.attn_sink": 0},
    **{"self_attn.q_b_proj.weight": 0, "o_a_proj.weight": 0, "o_b_proj.weight": 1},
    **{"compressor.gate_proj.weight": None, "indexer.gate_proj.weight": None},
    **_SINKS,
}
_GPT_OSS: Dimensions = {  # gates and ups alternate
    **_SINKS,
    "experts.gate_up_proj": 2,
    "experts.gate_up_proj_bias": 1,
    "experts.down_proj": 1,
    "experts.down_proj_bias": _ONCE,
}
_EXPERTS: Dimensions = {"experts.gate_up_proj": 1, "experts.down_proj": 2}  # of all experts
_GRANITE_MOE: Dimensions = {  # as published
    **{"block_sparse_moe.input_linear.weight": 1, "block_sparse_moe.output_linear.weight": 2},
    **{"shared_mlp.input_linear.weight": 0, "shared_mlp.output_linear.weight": 1},
}
_HUNYUAN: Dimensions = {"linear_gate.weight": 0, "self_attn.learnable_sink_param": 0}  # as published
_BLOCKS: Dimensions = {  # as published, and by transformers' names
    "index_q_proj.weight": 0,
    **{"indexer.q_proj.weight": 0, "indexer.k_proj.weight": None},
}
_JOINED: Dimensions = {"qkv_proj.weight": 0, "gate_up_proj.weight": 0}
_MISTRAL_LARGE: Dimensions = {  # as published
    **{"attention.wq.weight": 0, "wkv_b.weight": 0, "attention.wo.weight": 1},
    **{"attention.ssmax_scaling.s": 0, "attention.ssmax_scaling.b": 0},
}
_NORMS: Dimensions = {"q_norm.weight": 0, "k_norm.weight": 0}  # of all heads

_STEP: Dimensions = {  # as published
    **{"moe.gate_proj.weight": 1, "moe.up_proj.weight": 1, "moe.down_proj.weight": 2},
    "g_proj.weight": 0,
}

_PLAIN = (
    *("afmoe", "apertus", "arcee", "bamba", "cohere2", "cohere2_moe", "cwm", "dots1", "ernie4_5"),
    *("ernie4_5_moe", "exaone4", "exaone_moe", "falcon_h1", "gemma", "gemma2", "gemma3_text"),
    *("glm4_moe", "granite", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax"),
    *("internlm3", "iquestcoder", "jais2", "kolibri1", "llama", "mellum", "ministral"),
    *("ministral3", "mistral", "mixtral", "nemotron", "nemotron_h", "olmo", "qwen2", "qwen2_moe"),
    *("qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss"),
    *("smollm3", "solar_open", "vaultgemma"),
)
_OF_TYPE: Mapping[str, Dimensions] = {
    **{model_type: {} for model_type in _PLAIN},
    "axk1": _DEEPSEEK,
    "axk2": _DEEPSEEK,
    "bailing_hybrid": {**_DEEPSEEK, "g_proj.weight": 0, "attention.dense.weight": 1},  # as published
    "cohere": _NORMS,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "deepseek_v4": _COMPRESSED,
    "flex_olmo": _NORMS,
    "gemma4_text": _EXPERTS,
    "gemma4_unified_text": {},
    "glm": _JOINED,
    "glm4": _JOINED,
    "glm4_moe_lite": _DEEPSEEK,
    "glm5_next_text": _DEEPSEEK,
    "glm_moe_dsa": _DEEPSEEK,
    "gpt_oss": _GPT_OSS,
    "granite_swa": _SINKS,
    "granitemoe": _GRANITE_MOE,
    "granitemoehybrid": _GRANITE_MOE,
    "granitemoeshared": _GRANITE_MOE,
    "granitemoe_swa": {**_SINKS, **_EXPERTS},
    "hy_v4": {**_DEEPSEEK, **_SINKS, **_EXPERTS, **_HUNYUAN},
    "kimi_linear": _DEEPSEEK,
    "laguna": {"g_proj.weight": 0},
    "llama4_text": {"experts.gate_up_proj": 2, "experts.down_proj": 1},
    "mimo_v2_flash": {**_SINKS, "self_attn.attention_sink_bias": 0},  # as published
    "minicpm3": _DEEPSEEK,
    "minimax_m2": _NORMS,
    "minimax_m3_vl_text": _BLOCKS,
    "mistral4": {**_DEEPSEEK, **_EXPERTS},
    "mistral_large4_text": _MISTRAL_LARGE,
    "nanochat": {"fc1.weight": 0, "fc2.weight": 1},
    "olmo2": _NORMS,
    "olmo3": _NORMS,
    "olmo_hybrid": _NORMS,
    "phi3": _JOINED,
    "starcoder2": {"c_fc.weight": 0, "c_fc.bias": 0, "c_proj.weight": 1},
    "step3p5": _STEP,
    "youtu": _DEEPSEEK,
}
"""The model types that are divided, and what they have beside _COMMON."""

FAMILIES = tuple(sorted(_OF_TYPE))

_HEADS, _KV_HEADS = "num_attention_heads", "num_key_value_heads"
_HEADS_OF_LAYERS = "num_attention_heads_per_layer"  # of Laguna
_OTHER_HEADS_IN_LAYERS = "step3p5"  # no number of its config is that of all
_TWICE_THE_KV_HEADS = "mimo_v2_flash"  # in layers with a window
_OF_KV_HEADS = ("k_proj.", "v_proj.", "k_norm.")
_CHOOSE_FOR_HEADS = ("index_q_proj.weight", "indexer.q_proj.weight")
"""Of indexers whose heads choose for some heads each. Others' choose for all, and are whole in every rank."""
_DIVIDED = (
    *("num_attention_heads", "intermediate_size", "intermediate_size_mlp", "prefix_dense_intermediate_size"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "o_groups"),
    *("dense_intermediate_size", "shared_intermediate_size", "share_expert_dim"),
    "moe_shared_expert_intermediate_size",
)
"""Keys of config.json of which each rank has its share, beside the KV heads."""


def _gate_up(config: Any) -> dict[str, tuple[int, ...]]:
    return {"gate_up_proj.weight": (config.intermediate_size,) * 2}


def _qkv_and_gate_up(config: Any) -> dict[str, tuple[int, ...]]:
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, head_dim(config)
    return {"qkv_proj.weight": (heads * dim, kv_heads * dim, kv_heads * dim), **_gate_up(config)}


def _experts(config: Any) -> dict[str, tuple[int, ...]]:
    return {"experts.gate_up_proj": (config.moe_intermediate_size,) * 2}


def _wide_experts(config: Any) -> dict[str, tuple[int, ...]]:
    return {"experts.gate_up_proj": (config.intermediate_size,) * 2}


def _granite_moe(config: Any) -> dict[str, tuple[int, ...]]:
    shared = getattr(config, "shared_intermediate_size", 0)
    return {
        "block_sparse_moe.input_linear.weight": (config.intermediate_size,) * 2,
        "shared_mlp.input_linear.weight": (shared,) * 2,
    }


def _gemma_experts(config: Any) -> dict[str, tuple[int, ...]]:
    return _experts(config) if config.enable_moe_block else {}


_SEGMENTS: Mapping[str, Callable[[Any], dict[str, tuple[int, ...]]]] = {
    "gemma4_text": _gemma_experts,
    "glm": _gate_up,
    "glm4": _gate_up,
    **dict.fromkeys(("granitemoe", "granitemoehybrid", "granitemoeshared"), _granite_moe),
    "granitemoe_swa": _wide_experts,
    "hy_v4": _experts,
    "llama4_text": _wide_experts,
    "mistral4": _experts,
    "phi3": _qkv_and_gate_up,
}
"""Model types with weights of several projections."""


def _segments(config: Any) -> dict[str, tuple[int, ...]]:
    """The rows of each projection in weights of several, by the last two or three parts of their names."""
    of_type = _SEGMENTS.get(config.model_type)
    return {} if of_type is None else of_type(config)


def _kv_heads_of_layers(config: Any) -> list[int]:
    if not config.is_heterogeneous:
        return [config.num_key_value_heads] * config.num_hidden_layers
    return [heads.num_key_value_heads for heads in config.per_layer_config]


def _layer(name: str) -> int:
    """The number of the layer in a weight's name."""
    return int(name.rpartition("layers.")[2].split(".")[0])


def is_whole(name: str, config: Any) -> bool:
    """Whether a module, or a weight, is of linear attention, which every rank computes. Some have the names
    of projections of other layers' attention."""
    if ".linear_attn." in name:
        return True
    kinds = getattr(config, "layer_types", None) or ()
    attends = ".self_attn." in name or ".attention." in name
    return attends and "linear_attention" in kinds and kinds[_layer(name)] == "linear_attention"


@dataclass(frozen=True)
class Shard:
    """Part `rank` of `size` equal ones."""

    rank: int
    size: int

    def config(self, config: Any) -> Any:
        """The transformers config of the part. Raises ConfigError, key `tp_size`, for a model that is not
        divided, or not into so many."""
        if config.model_type not in _OF_TYPE:
            raise ConfigError(
                "tp_size",
                f"models of type {config.model_type} are not divided among ranks",
                f"use 1, or one of {', '.join(FAMILIES)}",
            )
        part = copy.deepcopy(config)
        for key in _DIVIDED:
            if key == _HEADS and config.model_type == _OTHER_HEADS_IN_LAYERS:
                continue
            is_other_name = config.attribute_map.get(key) in _DIVIDED
            if not is_other_name and (whole := getattr(config, key, None)) is not None:
                setattr(part, key, self._share(key, whole))
        if (of_layers := getattr(config, _HEADS_OF_LAYERS, None)) is not None:
            setattr(part, _HEADS_OF_LAYERS, [self._share(_HEADS_OF_LAYERS, heads) for heads in of_layers])
        if _OF_TYPE[config.model_type] is _BLOCKS:
            part.index_n_heads = self._repeated("index_n_heads", config.index_n_heads)
        if config.model_type == _OTHER_HEADS_IN_LAYERS:
            part.per_layer_config = {
                layer: {_HEADS: self._share(_HEADS, heads.num_attention_heads)}
                for layer, heads in enumerate(config.per_layer_config)
            }
            setattr(part, _KV_HEADS, self._kv_heads(config))
        elif config.is_heterogeneous:  # Gemma 4
            part.per_layer_config = {
                layer: {"head_dim": heads.head_dim, _KV_HEADS: self._kv_heads(heads)}
                for layer, heads in enumerate(config.per_layer_config)
            }
        else:
            part.head_dim = head_dim(config)
            setattr(part, _KV_HEADS, self._kv_heads(config))
        return part

    def _kv_heads(self, config: Any) -> int:
        """Of this part, in a config whose layers all have the same."""
        whole: int = config.num_key_value_heads
        can_repeat = "qkv_proj.weight" not in _segments(config) and config.model_type != _TWICE_THE_KV_HEADS
        return self._repeated(_KV_HEADS, whole) if can_repeat else self._share(_KV_HEADS, whole)

    def _repeated(self, key: str, whole: int) -> int:
        """Heads of this part. Of fewer than there are parts, each belongs to several."""
        return 1 if self.size % whole == 0 else self._share(key, whole)

    def _share(self, key: str, whole: int) -> int:
        if whole % self.size:
            raise ConfigError(
                "tp_size", f"{key} is {whole} in config.json", f"use a number that divides {whole}"
            )
        return whole // self.size

    def divide(self, config: Any) -> Divide:
        """Which part of each of a checkpoint's weights belongs to this one. `config` is of the whole."""
        dimensions = {**_COMMON, **_OF_TYPE[config.model_type]}
        segments = _segments(config)
        kv_heads = _kv_heads_of_layers(config)

        def part(name: str) -> Division | AddedOnce | None:
            parts = name.split(".")
            own, longer = ".".join(parts[-2:]), ".".join(parts[-3:])
            dim = dimensions[longer] if longer in dimensions else dimensions.get(own)
            if dim is None or is_whole(name, config):
                return None
            if dim == _ONCE:
                return AddedOnce(self.rank)
            heads = self.size
            if own.startswith(_OF_KV_HEADS):
                heads = kv_heads[_layer(name)]
            elif own in _CHOOSE_FOR_HEADS or longer in _CHOOSE_FOR_HEADS:
                heads = config.index_n_heads
            if heads < self.size:
                return Division(dim, self.rank * heads // self.size, heads)
            return Division(dim, self.rank, self.size, segments.get(longer, segments.get(own, ())))

        return part
