"""Tiny seeded models of every supported family, saved so that the served stack can load them.

Every parameter is random, norms and biases too: a bias that a fast path forgets is invisible at zero.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 320  # 256 bytes, 3 special tokens, 61 pairs of letters: every id a model can sample has a text
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}

FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_COMMON),
    "llama_bias": lambda: LlamaConfig(**_COMMON, attention_bias=True, mlp_bias=True, rope_parameters=_LLAMA3),
    "llama_yarn": lambda: LlamaConfig(**{**_COMMON, "num_key_value_heads": 4}, rope_parameters=_YARN),
    "mistral": lambda: MistralConfig(**_COMMON, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**{k: v for k, v in _COMMON.items() if k != "head_dim"}),
    "qwen3": lambda: Qwen3Config(**{**_COMMON, "head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, mlp_only_layers=[1]
    ),
    "mixtral": lambda: MixtralConfig(**_COMMON, num_local_experts=4, num_experts_per_tok=2),
    "phi3": lambda: Phi3Config(
        **_without("head_dim"),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **_without("head_dim"),
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        mlp_only_layers=[1],
    ),
}
"""Families and variants; the part before "_" is not always the model_type."""

WINDOW = 24
"""Of the tiny models with one: it bites in short contexts, and is no whole number of 16-token pages."""
_SLIDING = ["sliding_attention", "full_attention"] * 2
_LINEAR = ["linear_attention", "full_attention"] * 2


def _without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in _COMMON.items() if name not in names}


def _deepseek(**more: Any) -> dict[str, Any]:
    """Two dense layers, then two with experts in two groups."""
    return {
        **_without("head_dim"),
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 2,
        **more,
    }


def _delta_net(**more: Any) -> dict[str, Any]:
    """Gated delta nets with fewer keys than values, and gated attention that rotates half a head."""
    return {
        **_COMMON,
        "num_hidden_layers": 4,
        "layer_types": _LINEAR,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        **more,
    }


MIXED: dict[str, Callable[[], PretrainedConfig]] = {
    "deepseek_v2": lambda: DeepseekV2Config(
        **_deepseek(q_lora_rank=None, topk_method="group_limited_greedy", routed_scaling_factor=2.0)
    ),
    "deepseek_v2_lora": lambda: DeepseekV2Config(**_deepseek(q_lora_rank=24, topk_method="greedy")),
    "deepseek_v3": lambda: DeepseekV3Config(
        **_deepseek(q_lora_rank=24, rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 0.8})
    ),
    "deepseek_v3_halves": lambda: DeepseekV3Config(**_deepseek(q_lora_rank=None, rope_interleave=False)),
    "mistral_window": lambda: MistralConfig(**_COMMON, sliding_window=WINDOW),
    "gemma3_text": lambda: Gemma3TextConfig(
        **{**_COMMON, "num_hidden_layers": 4, "tie_word_embeddings": True},
        query_pre_attn_scalar=24,
        sliding_window=WINDOW,
        layer_types=_SLIDING,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "gemma2": lambda: Gemma2Config(
        **{**_COMMON, "num_hidden_layers": 4, "tie_word_embeddings": True},
        query_pre_attn_scalar=24,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=6.0,
        sliding_window=WINDOW,
        layer_types=_SLIDING,
    ),
    "phi3_window": lambda: Phi3Config(**_without("head_dim"), sliding_window=WINDOW),
    "gpt_oss": lambda: GptOssConfig(
        **{**_COMMON, "num_hidden_layers": 4, "intermediate_size": 64},
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=_SLIDING,
        rope_parameters={**_YARN, "truncate": False},
    ),
    "qwen3_next": lambda: Qwen3NextConfig(
        **_delta_net(
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            mlp_only_layers=[1, 2],
        )
    ),
    "qwen3_5_text": lambda: Qwen3_5TextConfig(**_delta_net()),
    "qwen3_5_moe_text": lambda: Qwen3_5MoeTextConfig(
        **_delta_net(
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        )
    ),
    "falcon_h1": lambda: FalconH1Config(
        **_without("head_dim"),
        mamba_d_ssm=96,
        mamba_n_heads=6,
        mamba_d_head=16,
        mamba_n_groups=2,
        mamba_d_state=12,
        mamba_chunk_size=8,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        projectors_bias=True,
        lm_head_multiplier=0.5,
        embedding_multiplier=1.5,
        mlp_multipliers=[0.8, 0.7],
        key_multiplier=0.9,
        attention_out_multiplier=0.8,
        attention_in_multiplier=1.2,
        ssm_multipliers=[0.9, 0.8, 1.1, 1.2, 0.7],
        ssm_in_multiplier=1.3,
        ssm_out_multiplier=0.6,
    ),
    "lfm2": lambda: Lfm2Config(
        **{**_without("head_dim"), "num_hidden_layers": 4, "tie_word_embeddings": True},
        conv_bias=True,
        block_auto_adjust_ff_dim=False,
        layer_types=["conv", "full_attention"] * 2,
    ),
    "phi3_longrope": lambda: Phi3Config(
        **_without("head_dim"),
        original_max_position_embeddings=512,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
            "original_max_position_embeddings": 512,
            "short_factor": [1.0, 1.1, 1.2, 1.4, 1.7, 2.0, 3.0, 4.0],
            "long_factor": [1.0, 2.0, 4.0, 6.0, 10.0, 20.0, 30.0, 40.0],
        },
    ),
}
"""Families with latents, windows or states. Tests that go through FAMILIES are about full attention alone."""


def make_tiny(family: str, directory: Path, seed: int) -> Path:
    """The directory of the tiny model (family, seed) under `directory`, written unless it exists."""
    path = directory / f"{family}-{seed}"
    if path.is_dir():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as unfinished:
        made = Path(unfinished) / "model"
        write_tiny({**FAMILIES, **MIXED}[family](), made, seed)
        try:
            os.rename(made, path)
        except OSError:  # another process has just written the same model
            assert path.is_dir()
    return path


def write_tiny(config: PretrainedConfig, path: Path, seed: int) -> None:
    """A model of `config`, random from `seed`, with tokenizer and generation config."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, seed)
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id)
    model.save_pretrained(path)
    write_tokenizer(path)


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Every parameter normal with deviation 0.1; norm weights around where they start: 1, or 0 if 1 is added.

    The layers' matrices are twice that and tied embeddings a fifth: otherwise the last token outweighs the
    context, and greedy decoding runs into a short cycle that hides wrong KV. Recurrent states decay slowly,
    for a state that is soon forgotten hides which one it was.
    """
    generator = torch.Generator().manual_seed(seed)
    tied = model.config.tie_word_embeddings
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            centre = float(parameter.flatten()[0])
            parameter.normal_(0.0, 0.1, generator=generator)
            kind = name.rpartition(".")[2]
            if kind in _SPREAD:
                mean, deviation = _SPREAD[kind]
                parameter.mul_(deviation / 0.1).add_(mean)
            elif parameter.ndim == 1 and not name.endswith("bias"):
                parameter.add_(centre)
            if name.endswith(_SHARP) or (centre == 0 and name.endswith(("q_norm.weight", "k_norm.weight"))):
                parameter.add_(1.0)
            if parameter.ndim > 1 and ".layers." in name:
                parameter.mul_(2.0)
            if parameter.ndim == 3 and "conv" in name:
                parameter.mul_(2.5)  # few taps
            if tied and "embed_tokens" in name:
                parameter.mul_(0.2)
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1, generator=generator)


_SHARP = ("q_layernorm.weight", "k_layernorm.weight")
"""With those around 2, attention is sharp where few layers attend: no page is lost in the mean of many."""
_SPREAD = {"A_log": (-3.0, 1.0), "dt_bias": (0.0, 1.0), "sinks": (1.0, 1.0)}
"""Last part of a parameter's name -> its mean and deviation."""


def write_tokenizer(path: Path) -> None:
    """Bytes, special tokens and some pairs of letters, VOCAB_SIZE in all; a ChatML template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "etaoinsr"
    pairs = [(a, b) for a in letters for b in letters][: VOCAB_SIZE - len(alphabet) - len(SPECIAL_TOKENS)]
    vocab = [*alphabet, *SPECIAL_TOKENS, *(a + b for a, b in pairs)]
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(vocab)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": _COMMON["max_position_embeddings"],
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
