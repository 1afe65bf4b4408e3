"""What it gains to keep quantised weights as they are stored: `python -m bench.kept_weights --json`.

Shape M in fp8 (blocks of 128 x 128, as DeepSeek-V3's and Qwen3's), in NVFP4 (Model Optimizer), and in int4
(GPTQ, groups of 128), and four layers of gpt-oss-20b's widths with 8 experts in MXFP4: seeded noise, context
512, real scheduler steps, sampler included. Each is loaded twice: as it is stored, and with `weight_dtype:
bfloat16`, for which its weights are widened.

`ratios`: `<format>_decode_b1`, `_decode_b8`, `_prefill_512`: time widened / time as stored, medians of
alternate measurements. `values`: milliseconds.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig

from bench.common import alternate, argument_parser, medians, print_result
from bench.engine_rig import EngineRig
from bench.family_floor import shapes
from bench.floor import CONTEXT, step_seconds
from bench.make_model import make_model, shape_m

Tensors = dict[str, torch.Tensor]
BLOCK = 128
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def to_fp8(weight: torch.Tensor) -> Tensors:
    """[outputs, inputs], multiples of 128 -> e4m3 numbers, the largest 448, and a scale for each block."""
    rows, columns = weight.shape
    blocks = weight.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3)) / 448
    numbers = (blocks / scales[:, None, :, None]).view(rows, columns)
    return {".weight": numbers.to(torch.float8_e4m3fn), ".weight_scale_inv": scales}


def to_int4(weight: torch.Tensor) -> Tensors:
    """[outputs, inputs], multiples of 8 and 128 -> GPTQ's tensors with zero points of 8."""
    outputs, inputs = weight.shape
    groups = weight.float().view(outputs, -1, 128)
    scales = groups.abs().amax(-1) / 7
    numbers = (groups / scales[..., None]).round().view(outputs, inputs).to(torch.int32) + 8
    words = torch.zeros(outputs, inputs // 8, dtype=torch.int32)
    for place in range(8):
        words |= numbers[:, place::8] << 4 * place
    zeros = torch.full((scales.shape[1], outputs // 8), 0x77777777, dtype=torch.int32)  # of 8, less one
    return {".qweight": words.T.contiguous(), ".qzeros": zeros, ".scales": scales.T.half().contiguous()}


def codes_of(sizes: torch.Tensor, is_negative: torch.Tensor) -> torch.Tensor:
    """The nearest codes of e2m1, pairs of neighbours in a byte."""
    codes = torch.bucketize(sizes.contiguous(), (E2M1[1:] + E2M1[:-1]) / 2) + 8 * is_negative
    return (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)


def to_nvfp4(weight: torch.Tensor) -> Tensors:
    """[outputs, inputs], multiples of 16 -> pairs of e2m1 numbers, e4m3 scales, and a factor."""
    blocks = weight.float().view(len(weight), -1, 16)
    most = blocks.abs().amax(-1)
    factor = most.max() / (6 * 448)
    scales = (most / 6 / factor).to(torch.float8_e4m3fn)
    sizes = blocks.abs() / (scales.float() * factor).clamp(min=1e-30)[..., None]
    codes = codes_of(sizes, blocks < 0).flatten(1)
    return {".weight": codes, ".weight_scale": scales, ".weight_scale_2": factor}


def to_mxfp4(weight: torch.Tensor) -> Tensors:
    """[experts, inputs, outputs] -> pairs of e2m1 numbers and E8M0 powers, a block of 32 inputs each."""
    experts = []
    for expert in weight.float():
        blocks = expert.T.reshape(expert.shape[1], -1, 32)
        powers = blocks.abs().amax(-1).clamp(min=1e-30).log2().floor() - 2
        sizes = blocks.abs() / powers.exp2()[..., None]
        experts.append((codes_of(sizes, blocks < 0), powers + 127))
    return {
        "_blocks": torch.stack([codes for codes, _ in experts]),
        "_scales": torch.stack([powers for _, powers in experts]).to(torch.uint8),
    }


Quantise = Callable[[torch.Tensor], Tensors]
FORMATS: dict[str, tuple[Callable[[], PretrainedConfig], str, Quantise, dict[str, Any]]] = {
    "fp8": (
        shape_m,
        "_proj.weight",
        to_fp8,
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]},
    ),
    "nvfp4": (shape_m, "_proj.weight", to_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "int4": (
        shape_m,
        "_proj.weight",
        to_int4,
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
    ),
    "mxfp4": (lambda: shapes()["gpt_oss"], "_proj", to_mxfp4, {"quant_method": "mxfp4"}),
}
"""The model, the names of its quantised weights, how one is quantised, and quantization_config."""


def write(form: str, directory: Path) -> None:
    """A model in this format."""
    config, suffix, quantise, settings = FORMATS[form]
    make_model(directory, config())
    path = directory / "model.safetensors"
    tensors: Tensors = {}
    for name, weight in load_file(path).items():
        if name.endswith(suffix):
            tensors |= {name.removesuffix(".weight") + part: each for part, each in quantise(weight).items()}
        else:
            tensors[name] = weight
    save_file(tensors, path, metadata={"format": "pt"})
    text = json.loads((directory / "config.json").read_text())
    text["quantization_config"] = settings
    (directory / "config.json").write_text(json.dumps(text))


def measure(form: str, threads: int, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """(ratios, values) of one format."""
    sides: dict[str, Callable[[], float]] = {}
    values: dict[str, float] = {}
    with ExitStack() as rigs:
        directory = Path(rigs.enter_context(tempfile.TemporaryDirectory()))
        write(form, directory)
        for kept, weight_dtype in (("stored", "auto"), ("widened", "bfloat16")):
            rig = rigs.enter_context(EngineRig(str(directory), threads, weight_dtype=weight_dtype))
            for batch in (1, 8):
                sides[f"decode_b{batch} {kept}"] = partial(step_seconds, rig, batch)
            sides[f"prefill_512 {kept}"] = partial(rig.prefill, CONTEXT)
        alternate(sides, 1)  # warm-up
        took = medians(alternate(sides, rounds))
    ratios = {}
    for name in ("decode_b1", "decode_b8", "prefill_512"):
        ratios[f"{form}_{name}"] = round(took[f"{name} widened"] / took[f"{name} stored"], 3)
        for kept in ("stored", "widened"):
            values[f"{form}_{name}_{kept}_ms"] = round(took[f"{name} {kept}"] * 1e3, 2)
    return ratios, values


def main() -> None:
    """Command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--format", action="append", choices=sorted(FORMATS), help="may be repeated")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ratios: dict[str, float] = {}
    values: dict[str, float] = {}
    for form in options.format or FORMATS:
        of_format = measure(form, options.threads, options.rounds)
        ratios |= of_format[0]
        values |= of_format[1]
    print_result("kept_weights", ratios, values, options.json)


if __name__ == "__main__":
    main()
