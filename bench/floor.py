"""How close decode and prefill come to what the machine can do: `python -m bench.floor --json`.

Shape M, bfloat16, context 512, real scheduler steps, sampler included, on each instruction set
of this machine.

decode floor    (2 bytes of each weight once + KV bytes of the batch) / best read bandwidth of the same
                threads over 1 GiB of huge pages, right before and after the steps: on a shared machine it
                changes by a factor of two within seconds. Coded weights, which `weight_dtype: auto` chooses
                for some instruction sets, have 1.53 bytes: a step may take less time than that
prefill floor   (2 x parameters of products x 512 + attention FLOPs + one row of logits; of the last layer
                K and V of all tokens, and all else of one) / best bfloat16 GEMM rate at M=512: of our kernel
                with that instruction set; for the best one, of torch too, where the CPU multiplies bfloat16
                (elsewhere torch's products are far slower)
mixed floor     the sum of the floors of decode_b1 and prefill_512, for one step that does both
int8_decode_b1, int8_decode_b8, int8_prefill_512
                not of a floor: time with bfloat16 weights / time with int8 weights (`weight_dtype`)
coded_decode_b1, coded_decode_b8, coded_prefill_512
                the same of coded weights, on instruction sets that use them

`values.<isa>`: floor time / our time, medians of alternate measurements, and tokens per second.
`ratios`: those of the machine's best instruction set, and `avx2_decode_b1`, `avx512_vnni_decode_b1`, ...:
time with these / time with AVX512-BF16, or with the best one of a machine without it. `--profile` prints the
time of each part of the decoder in a step, on stderr.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.common import alternate, argument_parser, medians, print_result, seconds
from bench.engine_rig import EngineRig
from bench.make_model import make_model
from engine.cpu.linear import CODING_ISAS, PackedLinear, Packer, check_packable
from engine.cpu.op import KernelsUnavailable, kernels, machine_isas, set_isa
from kvcache.buffers import allocate_private

CONTEXT = 512
BATCHES = (1, 8, 16)
COMPARED = ("decode_b1", "decode_b8", "prefill_512")
OTHERS = ("int8", "coded")
RATIOS = (*COMPARED, "mixed", *(f"{other}_{name}" for other in OTHERS for name in COMPARED))
MULTIPLIES_BF16 = ("avx512_bf16", "amx")
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


def step_seconds(rig: EngineRig, batch: int, on_prefilled: Callable[[], object] = lambda: None) -> float:
    """The median time of a decode step."""
    return statistics.median(rig.decode_steps(batch, CONTEXT, DECODE_STEPS, on_prefilled=on_prefilled))


class DecodeStep:
    """The median time of a decode step with one instruction set. The best one computes the contexts."""

    def __init__(self, rig: EngineRig, batch: int, isa: str | None = None) -> None:
        self._rig = rig
        self._batch = batch
        self._isa = isa

    def __call__(self) -> float:
        """One measurement, in seconds."""
        if self._isa is not None:
            set_isa(machine_isas()[-1])
        return step_seconds(self._rig, self._batch, self.begin)

    def begin(self) -> None:
        """The contexts have been computed."""
        if self._isa is not None:
            set_isa(self._isa)


class JudgedStep(DecodeStep):
    """A DecodeStep, and how it compares with reading its bytes.

    `of_floor`: floor time / our time of each measurement.
    """

    def __init__(
        self, rig: EngineRig, batch: int, step_bytes: float, read: ReadBandwidth, isa: str | None = None
    ) -> None:
        super().__init__(rig, batch, isa)
        self._step_bytes = step_bytes
        self._read = read
        self._rates: list[float] = []
        self.of_floor: list[float] = []

    def __call__(self) -> float:
        """One measurement, in seconds."""
        self._rates = []
        step = super().__call__()
        self._rates.append(self._read())
        self.of_floor.append(self._step_bytes / statistics.mean(self._rates) / step)
        return step

    def begin(self) -> None:
        """The contexts have been computed: read the bandwidth before the steps, too."""
        super().begin()
        self._rates.append(self._read())


class GemmRate:
    """FLOP/s of the fastest bfloat16 product at M=512 over shape M's four products of a layer.

    torch chooses its instruction set itself: its products count only `with_torch`.
    """

    def __init__(self, with_torch: bool) -> None:
        self._products: list[tuple[list[Any], torch.Tensor]] = []
        for outputs, inputs in GEMM_SHAPES:
            linear = torch.nn.Linear(inputs, outputs, bias=False).bfloat16()
            kinds: list[Any] = [linear] if with_torch else []
            with suppress(KernelsUnavailable):  # torch alone sets the floor then
                check_packable()
                kinds.append(PackedLinear(linear, packer=Packer("bfloat16")))
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
    return float(2 * parameters(config) + batch * CONTEXT * kv_per_token)


def prefill_flops(config: Any) -> float:
    """FLOPs of 512 new tokens: the decoder's products, causal attention, and one row of logits. The last
    layer needs K and V of all tokens, and all else of one."""
    last = config.num_hidden_layers - 1
    queries, kv = (
        2 * count * config.head_dim for count in (config.num_attention_heads, config.num_key_value_heads)
    )
    attention = 2 * queries * CONTEXT * (CONTEXT + 1) / 2
    return float(
        2 * (last * layer_parameters(config) + config.hidden_size * kv) * CONTEXT
        + 2 * (layer_parameters(config) - config.hidden_size * kv)
        + last * attention
        + 2 * queries * CONTEXT
        + 2 * config.hidden_size * config.vocab_size
    )


def layer_parameters(config: Any) -> int:
    """Those of a layer of shape M."""
    hidden: int = config.hidden_size
    heads: int = config.num_attention_heads
    attention = hidden * config.head_dim * (2 * heads + 2 * config.num_key_value_heads) + 2 * config.head_dim
    return int(attention + 3 * hidden * config.intermediate_size + 2 * hidden)


def parameters(config: Any) -> int:
    """Shape M's parameters, with its tied embedding."""
    layers = config.num_hidden_layers * layer_parameters(config)
    return int(layers + config.hidden_size + config.vocab_size * config.hidden_size)


def main() -> None:
    """Command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--model", type=Path, help="shape M's directory; written there if it is missing")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--isa", action="append", help="only this instruction set; may be repeated")
    parser.add_argument(
        "--profile", action="store_true", help="print the time of each part of a step, on stderr"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.model or Path(scratch)
        make_model(directory)
        isas = options.isa or instruction_sets()
        with ExitStack() as stack:
            rigs = load(stack, str(directory), options.threads, isas)
            run(rigs, isas, options.rounds, options.json)
            if options.profile:
                if isas != ["torch"]:
                    set_isa(isas[0])
                sys.stderr.write(rigs.of(isas[0]).profile(CONTEXT))


@dataclass(frozen=True)
class Rigs:
    """Shape M with weights in bfloat16, coded, and in int8. None: no instruction set has it."""

    plain: EngineRig
    coded: EngineRig | None
    int8: EngineRig | None

    def of(self, isa: str) -> EngineRig:
        """With the weights that `weight_dtype: auto` chooses."""
        return self.coded if self.coded is not None and isa in CODING_ISAS else self.plain


def load(stack: ExitStack, directory: str, threads: int, isas: list[str]) -> Rigs:
    """Load what these instruction sets need."""
    plain = stack.enter_context(EngineRig(directory, threads, weight_dtype="bfloat16"))
    if isas == ["torch"]:
        return Rigs(plain, None, None)
    coded = None
    if coding := [isa for isa in isas if isa in CODING_ISAS]:
        set_isa(coding[0])
        coded = stack.enter_context(EngineRig(directory, threads))
    return Rigs(plain, coded, stack.enter_context(EngineRig(directory, threads, weight_dtype="int8")))


def instruction_sets() -> list[str]:
    """Those of this machine that compute packed products, the best first. Without kernels: `torch`."""
    try:
        return [name for name in reversed(machine_isas()) if name != "base"]
    except KernelsUnavailable:
        return ["torch"]


class OfIsa:
    """What is measured of one instruction set."""

    def __init__(self, rigs: Rigs, read: ReadBandwidth, isa: str, with_torch: bool) -> None:
        rig = rigs.of(isa)
        self._isa = isa
        self._config = rig.hf_config
        chosen = None if isa == "torch" else isa
        self._decode = {
            batch: JudgedStep(rig, batch, decode_bytes(rig.hf_config, batch), read, chosen)
            for batch in BATCHES
        }
        sides: dict[str, Callable[[], float]] = {
            "gemm": GemmRate(with_torch),
            **{f"decode_b{batch}": step for batch, step in self._decode.items()},
            "prefill_512": partial(rig.prefill, CONTEXT),
            "mixed": partial(rig.mixed_step, CONTEXT, CONTEXT),
        }
        for name, other in (("int8", rigs.int8), ("plain", rigs.plain if rig is rigs.coded else None)):
            if other is not None:
                for batch in (1, 8):
                    sides[f"{name}_decode_b{batch}"] = DecodeStep(other, batch, chosen)
                sides[f"{name}_prefill_512"] = partial(other.prefill, CONTEXT)
        self._names = tuple(sides)
        self.sides = {f"{isa} {name}": self._on(side) for name, side in sides.items()}

    def _on(self, measure: Callable[[], float]) -> Callable[[], float]:
        def measured() -> float:
            if self._isa != "torch":
                set_isa(self._isa)
            return measure()

        return measured

    def summary(self, measured: Mapping[str, float]) -> dict[str, float]:
        """Floor time / our time, and tokens per second. `measured`: the medians of all sides."""
        side = {name: measured[f"{self._isa} {name}"] for name in self._names}
        prefill = prefill_flops(self._config) / side["gemm"]
        mixed = decode_bytes(self._config, 1) / measured["read"] + prefill
        plain = {name: side.get(f"plain_{name}", side[name]) for name in COMPARED}
        others: dict[str, float] = {}
        if "int8_decode_b1" in side:
            others |= {f"int8_{name}": plain[name] / side[f"int8_{name}"] for name in COMPARED}
        if "plain_decode_b1" in side:
            others |= {f"coded_{name}": plain[name] / side[name] for name in COMPARED}
        ratios = {
            **{f"decode_b{batch}": statistics.median(step.of_floor) for batch, step in self._decode.items()},
            "prefill_512": prefill / side["prefill_512"],
            "mixed": mixed / side["mixed"],
            **others,
        }
        return {
            **{name: round(ratio, 3) for name, ratio in ratios.items()},
            "gemm_gflops": round(side["gemm"] / 1e9),
            **{f"decode_b{batch}_tok_s": round(batch / side[f"decode_b{batch}"], 2) for batch in BATCHES},
            "prefill_512_ms": round(side["prefill_512"] * 1e3, 1),
        }


def run(rigs: Rigs, isas: list[str], rounds: int, as_json: bool) -> None:
    """Measure, and print the result."""
    read = ReadBandwidth()
    of_isa = {
        isa: OfIsa(rigs, read, isa, isa == isas[0] and isa in (*MULTIPLIES_BF16, "torch")) for isa in isas
    }
    sides: dict[str, Callable[[], float]] = {"read": read}
    for one in of_isa.values():
        sides |= one.sides
    alternate(sides, 1)  # warm-up
    measured = medians(alternate(sides, rounds))
    values: dict[str, Any] = {"read_gb_s": round(measured["read"] / 1e9, 1)}
    values |= {isa: one.summary(measured) for isa, one in of_isa.items()}
    ratios = {name: values[isas[0]][name] for name in RATIOS if name in values[isas[0]]}
    yardstick = "avx512_bf16" if "avx512_bf16" in isas else isas[0]
    for isa in isas[isas.index(yardstick) + 1 :]:
        for name in ("decode_b1", "decode_b8", "prefill_512", "mixed"):
            ratios[f"{isa}_{name}"] = round(measured[f"{isa} {name}"] / measured[f"{yardstick} {name}"], 3)
    print_result("floor", ratios, values, as_json)


if __name__ == "__main__":
    main()
