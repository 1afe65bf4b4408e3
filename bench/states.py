"""The cost of saving states for a prompt, and what a repeat gains: `python -m bench.states --json`.

A linear layer has a state only where a forward ends. So that a repeat of a prompt hits, a forward ends at the
prompt's last page border: a prompt takes one forward more than without a prefix cache.

A prompt of 500 tokens, page 16, bfloat16, real scheduler steps, in two small hybrid shapes (gated delta net
and short convolution, each beside full attention).

`ratios`, by shape: `cut_cost_*` is the time of a new prompt with the cache / without it (1.0: free),
`repeat_*` the time of a repeated prompt / of a new one. `values`: medians in milliseconds, and forwards per
new prompt.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import Lfm2Config, PretrainedConfig, Qwen3_5TextConfig

from bench.common import alternate, argument_parser, medians, print_result
from bench.engine_rig import EngineRig
from bench.make_model import VOCAB_SIZE, make_model

PROMPT_TOKENS = 500
ROUNDS = 9

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": 256,
    "dtype": torch.bfloat16,
}


def shapes() -> dict[str, PretrainedConfig]:
    """By name, a hybrid model with two layers of full attention in eight."""
    return {
        "delta_net": Qwen3_5TextConfig(
            **_COMMON,
            head_dim=64,
            linear_num_key_heads=8,
            linear_num_value_heads=8,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
        ),
        "short_conv": Lfm2Config(
            **_COMMON,
            layer_types=["conv", "conv", "conv", "full_attention"] * 2,
            block_auto_adjust_ff_dim=False,
        ),
    }


def measure(model: Path, threads: int) -> tuple[dict[str, float], dict[str, float]]:
    """(ratios, values) of one shape."""
    with (
        EngineRig(str(model), threads, "radix") as cached,
        EngineRig(str(model), threads, "none") as plain,
    ):
        drawn = [cached.draw(PROMPT_TOKENS)]

        def cold() -> float:
            drawn.append(cached.draw(PROMPT_TOKENS))
            return cached.prefill_prompt(drawn[-1])

        sides = {
            "cold": cold,
            "repeat": lambda: cached.prefill_prompt(drawn[-1]),
            "uncached": lambda: plain.prefill(PROMPT_TOKENS),
        }
        alternate(sides, 1)  # warm
        cuts = cached.metrics.cut_forwards
        took = medians(alternate(sides, ROUNDS))
        assert cached.metrics.cached_tokens >= ROUNDS * (PROMPT_TOKENS - 16), "a repeat did not hit"
        cuts = cached.metrics.cut_forwards - cuts
    ratios = {"cut_cost": took["cold"] / took["uncached"], "repeat": took["repeat"] / took["cold"]}
    values = {f"{name}_ms": seconds * 1e3 for name, seconds in took.items()}
    return ratios, {**values, "forwards": 1 + cuts / ROUNDS}


def main() -> None:
    """Command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    ratios: dict[str, float] = {}
    values: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, config in shapes().items():
            make_model(Path(directory) / name, config)
            of_shape = measure(Path(directory) / name, options.threads)
            ratios |= {f"{key}_{name}": round(value, 3) for key, value in of_shape[0].items()}
            values |= {f"{key}_{name}": round(value, 3) for key, value in of_shape[1].items()}
    print_result("states", ratios, values, options.json)


if __name__ == "__main__":
    main()
