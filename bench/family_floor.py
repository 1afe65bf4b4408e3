"""How close decode of more families is to the memory bandwidth: `python -m bench.family_floor --json`.

Mixtures, hybrids and dense models in the widths of published ones, with fewer layers and experts and a
vocabulary of 32,768, so that each takes about 2 GB: seeded bfloat16 noise, context 512, real scheduler steps,
sampler included.

decode floor    (the bytes of all weights that a step needs, of a mixture those of the chosen experts, + the
                rows' KV, + their states twice) / best read bandwidth of the same threads over 1 GiB, right
                before and after the steps

`ratios`: `<family>_b1`, `<family>_b8`: floor time / our time, medians of alternate measurements.
`values`: milliseconds a step, experts read a layer, megabytes a step.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV4Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    NemotronHConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from bench.common import alternate, argument_parser, medians, print_result
from bench.engine_rig import EngineRig
from bench.floor import CONTEXT, DECODE_STEPS, JudgedStep, ReadBandwidth
from bench.make_model import VOCAB_SIZE, make_model

BATCHES = (1, 8)
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": 256,
    "dtype": torch.bfloat16,
}


def shapes() -> dict[str, PretrainedConfig]:
    """The models, by family."""
    return {**_dense(), **_mixtures(), **_hybrids()}


def _dense() -> dict[str, PretrainedConfig]:
    """With the widths of Gemma 3 1B, Granite 3.3 2B and Phi-4-mini."""
    return {
        "gemma3": Gemma3TextConfig(
            **COMMON,
            hidden_size=1152,
            num_hidden_layers=26,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=256,
            intermediate_size=6912,
            sliding_window=512,
        ),
        "gemma4": Gemma4TextConfig(
            **{**COMMON, "tie_word_embeddings": True},
            hidden_size=1536,
            num_hidden_layers=35,
            num_attention_heads=8,
            num_key_value_heads=1,
            head_dim=256,
            global_head_dim=512,
            intermediate_size=6144,
            use_double_wide_mlp=True,
            num_kv_shared_layers=20,
            hidden_size_per_layer_input=256,
            vocab_size_per_layer_input=VOCAB_SIZE,
            sliding_window=512,
            layer_types=[*["sliding_attention"] * 4, "full_attention"] * 7,
        ),
        "gemma4_moe": Gemma4TextConfig(
            **{**COMMON, "tie_word_embeddings": True},
            hidden_size=2816,
            num_hidden_layers=6,
            num_attention_heads=16,
            num_key_value_heads=8,
            num_global_key_value_heads=2,
            head_dim=256,
            global_head_dim=512,
            attention_k_eq_v=True,
            intermediate_size=2112,
            enable_moe_block=True,
            num_experts=128,
            top_k_experts=8,
            moe_intermediate_size=704,
            hidden_size_per_layer_input=0,
            num_kv_shared_layers=0,
            layer_types=[*["sliding_attention"] * 5, "full_attention"],
        ),
        "granite": GraniteConfig(
            **COMMON,
            hidden_size=2048,
            num_hidden_layers=12,
            num_attention_heads=32,
            num_key_value_heads=8,
            intermediate_size=8192,
            attention_multiplier=1 / 64,
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            logits_scaling=8.0,
        ),
        "phi3": Phi3Config(
            **COMMON,
            hidden_size=3072,
            num_hidden_layers=8,
            num_attention_heads=24,
            num_key_value_heads=8,
            intermediate_size=8192,
            partial_rotary_factor=0.75,
        ),
    }


def _mixtures() -> dict[str, PretrainedConfig]:
    """With the widths of Qwen3-30B-A3B, gpt-oss-20b, DeepSeek-V2-Lite (with V3's router and low-rank queries)
    and DeepSeek-V4-Flash."""
    return {
        "qwen3_moe": Qwen3MoeConfig(
            **COMMON,
            hidden_size=2048,
            num_hidden_layers=6,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            moe_intermediate_size=768,
            num_experts=32,
            num_experts_per_tok=8,
            norm_topk_prob=True,
        ),
        "gpt_oss": GptOssConfig(
            **COMMON,
            hidden_size=2880,
            num_hidden_layers=4,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=64,
            intermediate_size=2880,
            num_local_experts=8,
            num_experts_per_tok=4,
            sliding_window=128,
        ),
        "deepseek": DeepseekV3Config(
            **COMMON,
            hidden_size=2048,
            num_hidden_layers=6,
            first_k_dense_replace=1,
            intermediate_size=10_944,
            num_attention_heads=16,
            num_key_value_heads=16,
            q_lora_rank=768,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            moe_intermediate_size=1408,
            n_routed_experts=16,
            num_experts_per_tok=6,
            n_shared_experts=2,
            n_group=1,
            topk_group=1,
        ),
        "deepseek_v4": DeepseekV4Config(
            **COMMON,
            hidden_size=4096,
            num_hidden_layers=3,
            layer_types=[
                *("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"),
            ],
            mlp_layer_types=["hash_moe", "moe", "moe"],
            n_routed_experts=16,
        ),
    }


def _hybrids() -> dict[str, PretrainedConfig]:
    """With the widths of Qwen3-Next-80B-A3B, Kimi-Linear-48B-A3B, Granite-4.0-H-Micro and
    Nemotron-3-Nano-30B-A3B."""
    return {
        "qwen3_next": Qwen3NextConfig(
            **COMMON,
            hidden_size=2048,
            num_hidden_layers=8,
            num_attention_heads=16,
            num_key_value_heads=2,
            head_dim=256,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            num_experts=32,
            num_experts_per_tok=10,
        ),
        "kimi_linear": KimiLinearConfig(
            **COMMON,
            hidden_size=2304,
            num_hidden_layers=8,
            layer_types=[*["linear_attention"] * 3, "full_attention"] * 2,
            intermediate_size=9216,
            moe_intermediate_size=1024,
            num_local_experts=16,
        ),
        "granite_hybrid": GraniteMoeHybridConfig(
            **COMMON,
            hidden_size=2048,
            num_hidden_layers=10,
            layer_types=[*["linear_attention"] * 9, "full_attention"],
            num_attention_heads=32,
            num_key_value_heads=8,
            shared_intermediate_size=8192,
            num_local_experts=0,
            position_embedding_type="nope",
            mamba_n_heads=64,
            mamba_n_groups=1,
            mamba_d_state=128,
            attention_multiplier=1 / 64,
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            logits_scaling=8.0,
        ),
        "nemotron_h": NemotronHConfig(
            **COMMON,
            hidden_size=2688,
            layer_types=[*["linear_attention", "moe"] * 4, "full_attention"],
            num_attention_heads=32,
            num_key_value_heads=2,
            head_dim=128,
            mamba_num_heads=64,
            moe_intermediate_size=1856,
            moe_shared_expert_intermediate_size=3712,
            n_routed_experts=16,
            num_experts_per_tok=6,
            time_step_min=1e-30,
        ),
    }


class Weights:
    """The bytes of a model's weights that every step reads, and of one expert."""

    def __init__(self, config: PretrainedConfig) -> None:
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        self.shared = self.expert = 0
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                self.expert = self.expert or 0
                self.expert += parameter[0].numel() * 2
            elif "embed" not in name:
                self.shared += parameter.numel() * 2
        self.mixtures = sum(name.endswith(".experts") for name, _ in model.named_modules())
        self.expert //= max(1, self.mixtures)


def experts_read(rig: EngineRig, batch: int) -> float:
    """The mean number of experts that a layer reads in a decode step of `batch` rows."""
    counts: list[int] = []

    def count(_: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        if len(arguments[0]) == batch:
            counts.append(len(set(arguments[1].flatten().tolist())))

    experts = [module for name, module in rig.model.named_modules() if name.endswith(".experts")]
    hooks = [module.register_forward_pre_hook(count) for module in experts]
    rig.decode_steps(batch, CONTEXT, DECODE_STEPS)
    for hook in hooks:
        hook.remove()
    return statistics.mean(counts) if experts else 0.0


def measure(config: PretrainedConfig, threads: int, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """(ratios, values) of one family, by batch."""
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory), config)
        weights = Weights(config)
        with EngineRig(directory, threads) as rig:
            read = ReadBandwidth()
            steps: dict[str, JudgedStep] = {}
            values: dict[str, float] = {}
            for batch in BATCHES:
                experts = experts_read(rig, batch)
                step_bytes = weights.shared + weights.mixtures * weights.expert * experts
                step_bytes += batch * rig.state_bytes(CONTEXT)
                steps[f"b{batch}"] = JudgedStep(rig, batch, step_bytes, read)
                values[f"b{batch}_experts"] = round(experts, 1)
                values[f"b{batch}_mb"] = round(step_bytes / 1e6)
            took = medians(alternate({"read": read, **steps}, rounds))  # experts_read has warmed up
            values["read_gb_s"] = round(took["read"] / 1e9, 1)
            values |= {f"{name}_ms": round(took[name] * 1e3, 2) for name in steps}
            return {name: round(statistics.median(step.of_floor), 3) for name, step in steps.items()}, values


def main() -> None:
    """Command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--family", action="append", choices=sorted(shapes()), help="may be repeated")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ratios: dict[str, float] = {}
    values: dict[str, float] = {}
    for family, config in shapes().items():
        if options.family and family not in options.family:
            continue
        of_family = measure(config, options.threads, options.rounds)
        ratios |= {f"{family}_{name}": value for name, value in of_family[0].items()}
        values |= {f"{family}_{name}": value for name, value in of_family[1].items()}
    print_result("family_floor", ratios, values, options.json)


if __name__ == "__main__":
    main()
