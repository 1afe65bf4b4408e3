"""How close decode and prefill come to what the machine can do: `python -m bench.floor --json`.

Shape M, bfloat16, context 512, real scheduler steps, sampler included.

decode floor    (all weight bytes once + KV bytes of the batch) / best read bandwidth of the same threads over
                1 GiB of huge pages
prefill floor   (2 x non-embedding parameters x 512 + attention FLOPs + one row of logits) / best bfloat16
                GEMM rate at M=512 of any kernel here

`ratios`: floor time / our time, both medians of alternate measurements. `--profile` prints the time of each
part of the decoder in a step, on stderr.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.common import alternate, argument_parser, medians, print_result, seconds
from bench.engine_rig import EngineRig
from bench.make_model import make_model
from engine.cpu.linear import PackedLinear, check_packable
from engine.cpu.op import KernelsUnavailable, kernels
from kvcache.buffers import allocate_private

CONTEXT = 512
DECODE_STEPS = 24
READ_BYTES = 1 << 30
GEMM_SHAPES = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))  # shape M's (outputs, inputs)


class ReadBandwidth:
    """Bytes per second of the fastest reader here over 1 GiB of touched huge pages."""

    def __init__(self) -> None:
        self._buffer = allocate_private(READ_BYTES)
        self._buffer.tensor.fill_(1)

    def __call__(self) -> float:
        """One measurement: the best of torch and the kernels' own reader, twice each."""
        values = self._buffer.tensor.view(torch.float32)
        times = [seconds(values.sum) for _ in range(2)]
        try:
            read = kernels().baton_read
        except KernelsUnavailable:
            return READ_BYTES / min(times)
        address = self._buffer.tensor.data_ptr()
        times += [seconds(lambda: read(address, READ_BYTES, torch.get_num_threads())) for _ in range(2)]
        return READ_BYTES / min(times)


class GemmRate:
    """FLOP/s of the fastest bfloat16 product at M=512 over shape M's four products of a layer."""

    def __init__(self) -> None:
        self._products: list[tuple[list[Any], torch.Tensor]] = []
        for outputs, inputs in GEMM_SHAPES:
            linear = torch.nn.Linear(inputs, outputs, bias=False).bfloat16()
            kinds: list[Any] = [linear]
            with suppress(KernelsUnavailable):  # torch alone sets the floor then
                check_packable()
                kinds.append(PackedLinear(linear))
            self._products.append((kinds, torch.randn(CONTEXT, inputs).bfloat16()))

    @torch.inference_mode()
    def __call__(self) -> float:
        """One measurement: the best kernel of each shape, three tries each."""
        flops = sum(2 * CONTEXT * outputs * inputs for outputs, inputs in GEMM_SHAPES)
        spent = 0.0
        for kinds, x in self._products:
            spent += min(seconds(partial(kind, x)) for kind in kinds for _ in range(3))
        return flops / spent


def decode_bytes(config: Any, batch: int) -> float:
    """Bytes that one decode step must read: every weight once and the batch's KV."""
    kv_per_token: int = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
    return float(2 * parameters(config, embedding=True) + batch * CONTEXT * kv_per_token)


def prefill_flops(config: Any) -> float:
    """FLOPs of 512 new tokens: the decoder's products, causal attention, and one row of logits."""
    attention = 4 * config.num_attention_heads * config.head_dim * CONTEXT * (CONTEXT + 1) / 2
    return float(
        2 * parameters(config, embedding=False) * CONTEXT
        + config.num_hidden_layers * attention
        + 2 * config.hidden_size * config.vocab_size
    )


def parameters(config: Any, embedding: bool) -> int:
    """Shape M's parameters, with its tied embedding or without."""
    hidden: int = config.hidden_size
    head: int = config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    attention = hidden * head * (2 * heads + 2 * kv_heads) + 2 * head
    layer = attention + 3 * hidden * config.intermediate_size + 2 * hidden
    layers: int = config.num_hidden_layers * layer
    return layers + hidden + (config.vocab_size * hidden if embedding else 0)


def main() -> None:
    """Command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--model", type=Path, help="shape M's directory; written there if it is missing")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--profile", action="store_true", help="print the time of each part of a step, on stderr"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.model or Path(scratch)
        make_model(directory)
        with EngineRig(str(directory), options.threads) as rig:
            run(rig, options.rounds, options.profile, options.json)


def run(rig: EngineRig, rounds: int, profile: bool, as_json: bool) -> None:
    """Measure, and print the result."""
    sides: dict[str, Callable[[], float]] = {
        "read": ReadBandwidth(),
        "gemm": GemmRate(),
        "decode_b1": lambda: statistics.median(rig.decode_steps(1, CONTEXT, DECODE_STEPS)),
        "decode_b8": lambda: statistics.median(rig.decode_steps(8, CONTEXT, DECODE_STEPS)),
        "prefill_512": lambda: rig.prefill(CONTEXT),
    }
    alternate(sides, 1)  # warm-up
    measured = medians(alternate(sides, rounds))
    config = rig.hf_config
    floors = {
        "decode_b1": decode_bytes(config, 1) / measured["read"],
        "decode_b8": decode_bytes(config, 8) / measured["read"],
        "prefill_512": prefill_flops(config) / measured["gemm"],
    }
    ratios = {name: round(floor / measured[name], 3) for name, floor in floors.items()}
    values = {
        "read_gb_s": round(measured["read"] / 1e9, 1),
        "gemm_gflops": round(measured["gemm"] / 1e9),
        "decode_b1_tok_s": round(1 / measured["decode_b1"], 2),
        "decode_b8_tok_s": round(8 / measured["decode_b8"], 2),
        "prefill_512_ms": round(measured["prefill_512"] * 1e3, 1),
    }
    if profile:
        sys.stderr.write(rig.profile(CONTEXT))
    print_result("floor", ratios, values, as_json)


if __name__ == "__main__":
    main()
