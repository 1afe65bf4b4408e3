"""What it gains that layers without keys and values of their own compute only tokens that are read:
`python -m bench.shared_layers --json`.

A chunk of 512 tokens that ends a prompt, in bfloat16, through 14 layers of Gemma 4 E2B's kind, of which the
last 7 share (E2B: 20 of 35), by turns with one token read, as for an answer, and with all of them read, as
for an embedding.

`ratios`: `chunk` is the time with all tokens read / with one. `values`: medians in milliseconds.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from transformers import Gemma4TextConfig

from bench.common import alternate, argument_parser, medians, print_result, seconds
from bench.make_model import VOCAB_SIZE, make_model
from engine.config import EngineConfig
from engine.largest_batch import largest_batch
from engine.loader import load_model
from engine.runner import ModelRunner
from kvcache.config import CacheConfig
from kvcache.memory import build_memory

TOKENS, PAGE_SIZE, ROUNDS = 512, 16, 5
_TIMEOUT_S = 600.0


def shape() -> Gemma4TextConfig:
    """The model's configuration."""
    return Gemma4TextConfig(
        vocab_size=VOCAB_SIZE,
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size=1024,
        hidden_size_per_layer_input=64,
        intermediate_size=4096,
        use_double_wide_mlp=True,
        num_hidden_layers=14,
        num_kv_shared_layers=7,
        layer_types=(["sliding_attention"] * 6 + ["full_attention"]) * 2,
        sliding_window=512,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=256,
        global_head_dim=512,
        eos_token_id=258,
        dtype=torch.bfloat16,
    )


def measure(model: Path, threads: int) -> dict[str, float]:
    """Seconds of a chunk, by what of it is read."""
    config = EngineConfig(str(model), threads=threads, overlap=False)
    loaded = load_model(config)
    sizes = CacheConfig(
        page_size=PAGE_SIZE, total_tokens=2 * TOKENS, max_context_len=TOKENS, max_running_requests=1
    )
    with build_memory(sizes, loaded.spec.groups) as memory:
        runner = ModelRunner(loaded, memory.kv_caches, config)
        whole = largest_batch(loaded.spec, [TOKENS], PAGE_SIZE)
        batches = {"all": whole, "one": replace(whole, pooled=())}
        sides = {
            name: lambda batch=batch: seconds(lambda: runner.launch(batch).result(_TIMEOUT_S))
            for name, batch in batches.items()
        }
        alternate(sides, 1)  # warm
        took = medians(alternate(sides, ROUNDS))
        runner.close()
    return took


def main() -> None:
    """Command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory), shape())
        took = measure(Path(directory), options.threads)
    values = {f"{name}_ms": round(spent * 1e3, 1) for name, spent in took.items()}
    ratios = {"chunk": round(took["all"] / took["one"], 3)}
    print_result("shared_layers", ratios, values, options.json)


if __name__ == "__main__":
    main()
