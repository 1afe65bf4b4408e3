"""What it gains that a GPU multiplies fp8, MXFP4, NVFP4 and int4 weights as they are stored:
`python -m bench.gpu_products --json`.

Products of rows with 16 matrices [6144, 4096] in turn, more than any cache holds, recorded as a graph:
torch's in bfloat16, and ours (engine/cuda/stored_kernel.py) with as many weights in each format.

`ratios`: fp8_1, fp8_8, fp8_64, fp8_1024, mxfp4_1, ...   time in bfloat16 / our time, by format and rows
`values`: bfloat16_1_us, fp8_1_us, ...                   microseconds of one product

All are medians of measurements taken in turn. Without a GPU it says why, and `ratios` and `values` are empty.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch

from bench.common import alternate, argument_parser, medians, print_result, seconds
from common.errors import ConfigError
from engine.cuda.coded_weights import CodedWeights
from engine.cuda.stored_product import Product, StoredProduct
from worker.device import choose_device

OUTPUTS, INPUTS, MATRICES = 6144, 4096, 16
ROWS = (1, 8, 64, 1024)
FORMATS = ("fp8", "mxfp4", "nvfp4", "int4")
ROUNDS, PASSES = 11, 10


def products_of(form: str, device: torch.device, outputs: int, inputs: int, count: int) -> list[Product]:
    """So many products with random weights."""
    if form == "bfloat16":
        matrices = torch.randn(count, outputs, inputs, device=device, dtype=torch.bfloat16)
        return [partial(torch.nn.functional.linear, weight=matrix) for matrix in matrices]
    made = partial(torch.randint, device=device, dtype=torch.uint8)
    shape, scales = (1, outputs), torch.rand(1, outputs, -(-inputs // 128), device=device)
    of_form: dict[str, Callable[[], CodedWeights]] = {
        "fp8": lambda: CodedWeights(made(0, 120, (*shape, inputs)), scales),
        "mxfp4": lambda: CodedWeights(
            made(0, 256, (*shape, inputs // 2)), made(120, 128, (*shape, inputs // 32))
        ),
        "nvfp4": lambda: CodedWeights(
            made(0, 256, (*shape, inputs // 2)),
            made(0, 120, (*shape, inputs // 16)),
            factors=torch.rand(*shape, 1, device=device),
        ),
        "int4": lambda: CodedWeights(
            made(0, 256, (*shape, inputs // 2)), scales.half(), made(0, 16, scales.shape)
        ),
    }
    return [StoredProduct(of_form[form]()) for _ in range(count)]


def passes(products: list[Product], x: torch.Tensor) -> Callable[[], float]:
    """A function that multiplies `x` with all matrices PASSES times. Returns the seconds of one product."""

    def once() -> None:
        for product in products:
            product(x)

    once()  # Triton compiles
    if x.device.type != "cuda":
        return lambda: seconds(once) / len(products)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()

    def replay() -> None:
        for _ in range(PASSES):
            graph.replay()
        torch.cuda.synchronize(x.device)

    return lambda: seconds(replay) / PASSES / len(products)


def run(
    device: torch.device, outputs: int, inputs: int, count: int, rounds: int
) -> tuple[dict[str, float], dict[str, float]]:
    """(ratios, values)."""
    sides = {}
    for form in ("bfloat16", *FORMATS):
        products = products_of(form, device, outputs, inputs, count)
        for rows in ROWS:
            x = torch.randn(rows, inputs, device=device, dtype=torch.bfloat16)
            sides[f"{form}_{rows}"] = passes(products, x)
    with torch.inference_mode():
        took = medians(alternate(sides, rounds))
    ratios = {
        f"{form}_{rows}": round(took[f"bfloat16_{rows}"] / took[f"{form}_{rows}"], 3)
        for form in FORMATS
        for rows in ROWS
    }
    return ratios, {f"{name}_us": round(each * 1e6, 2) for name, each in took.items()}


def main() -> None:
    """Command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N")
    options = parser.parse_args()
    try:
        device = choose_device(options.device)
    except ConfigError as error:
        sys.stderr.write(f"bench.gpu_products: not measured: {error.problem}\n")
        print_result("gpu_products", {}, {}, options.json)
        return
    # Graphs and Triton's kernels are on the current device.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        ratios, values = run(device, OUTPUTS, INPUTS, MATRICES, ROUNDS)
    print_result("gpu_products", ratios, values, options.json)


if __name__ == "__main__":
    main()
