"""python -m tools.gpu_dry_run: the CUDA path of every family, without a GPU.

Prompts in chunks, mixed batches and decode steps from recorded graphs run on fake CUDA tensors
(tools/fake_cuda.py): runner, states, attention backends with stand-ins for FlashInfer's wrappers, sampler.
Then pages go to the host and back as in a transfer to another host. It ends with 1 if any step would wait for
the device, mix devices, copy through pageable memory, or capture what does not lie still. docs/gpu.md says
what this proves and what it does not.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch

import kvtransfer.region
from common.arguments import ExactParser
from engine import loader
from engine.batch import ForwardBatch
from engine.checkpoint.stored import dequantise_parameters
from engine.completion import HostCompletions
from engine.config import EngineConfig
from engine.cuda import triton_kernels
from engine.graphs import DecodeLimits
from engine.largest_batch import largest_batch, largest_lens
from engine.module_replacements import replacement_table
from engine.parallel.group import side_by_side
from engine.ranks.messages import Compute, LoadPart
from engine.ranks.rank import ModelPart
from engine.replacement_table import apply_replacements
from engine.row_widths import fitted
from engine.runner import ModelRunner
from engine.spec import ModelSpec
from kvcache.divided import pool_of_parts
from kvcache.layout import GroupSpec, rank_spec
from kvcache.open_pool import open_pool
from kvcache.page_runs import as_pages
from kvcache.pool import KVCache
from kvtransfer.copies import CudaCopies
from kvtransfer.region import GroupRegion, spread_region
from tests.support import flashinfer_stand_in as stand_in
from tests.support.driver import Driver
from tests.support.quantised_checkpoints import write
from tests.support.tiny_configs import FAMILIES, MIXED, SIMILAR
from tests.support.tiny_models import make_tiny
from tests.support.wide_models import WIDE, make_wide
from tools.fake_cuda import FakeCuda, FakeRecorder, GpuFault, on_fake_cuda
from wire.request import SamplingParams

PAGE, PAGES = 16, 64
LIMITS = DecodeLimits(sequences=4, context_pages=8, rows=16)
PARAMS = (
    SamplingParams(temperature=0.0, max_new_tokens=64),
    SamplingParams(temperature=1.0, top_k=20, top_p=0.9, min_p=0.01, seed=1, max_new_tokens=64),
    SamplingParams(
        temperature=0.7, repetition_penalty=1.1, presence_penalty=0.2, top_logprobs=3, max_new_tokens=64
    ),
)

STORED = {
    "qwen3-fp8": "fp8_wide",
    "qwen3_moe-wide-fp8": "fp8_wide",
    "deepseek_v3-fp8": "fp8_wide",
    "gpt_oss-mxfp4": "mxfp4",
    "deepseek_v4-fp8_fp4": "fp8_fp4",
    "qwen3-wide-modelopt_nvfp4": "modelopt_nvfp4",
    "mixtral-ct_nvfp4": "ct_nvfp4",
    "qwen3-wide-awq": "awq",
    "mixtral-gptq": "gptq",
}
"""Models whose weights stay as the checkpoint stored them, and the checkpoint's format."""
RANKS = (
    *("qwen3-wide-rank0", "qwen3-wide-rank1", "qwen2_moe-rank1", "gemma3_text-rank1"),
    *("gpt_oss-rank1", "deepseek_v3-rank1", "deepseek_v32-rank1", "qwen3_next-rank1", "minimax_m2-rank1"),
    *("deepseek_v4-rank1", "minimax_m3_vl_text-rank1", "mistral_large4_text-rank1", "glm5_next_text-rank1"),
)
"""One of the two ranks of a worker, beside another that only answers."""
NAMES = sorted({*FAMILIES, *MIXED, *SIMILAR, *STORED, *RANKS} | {f"{family}-wide" for family in WIDE})
"""Families, and with "-wide" models of them whose heads FlashInfer has kernels for."""


@dataclass
class OneOfTwo:
    """A RankGroup whose other rank always answers, with nothing."""

    rank: int
    size: int = 2

    def sum(self, summand: torch.Tensor) -> None:
        summand.add_(0)

    def share(self, values: torch.Tensor) -> None:
        values.add_(0)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return side_by_side(part.expand(self.size, *part.shape))

    def close(self) -> None:
        """Nobody is there."""


class DeafRanks:
    """What a ModelRunner needs of Ranks."""

    def __init__(self, group: OneOfTwo) -> None:
        self.group = group

    def compute(self, batch: ForwardBatch, heads: Sequence[npt.NDArray[np.int64]]) -> None:
        Compute.of(batch, heads)

    def record_decode(self, limits: DecodeLimits) -> None:
        """Nobody records."""

    def await_recorded(self) -> None:
        """Nobody has to be waited for."""

    def close(self) -> None:
        """Nobody is there."""


class RankEngine:
    """A rank that does not sample, driven as a ModelRunner."""

    def __init__(self, spec: ModelSpec, rank: ModelPart) -> None:
        self.spec = spec
        self._rank = rank

    def issue(self, batch: ForwardBatch) -> None:
        self._rank.compute(Compute.of(batch, [batch.sampled_places()]))


def make_model(name: str, directory: Path) -> Path:
    """Write the model of one of NAMES."""
    name, _, _ = name.partition("-rank")
    if name in STORED:
        return write(name.rpartition("-")[0], directory, 0, STORED[name])[0]
    family, is_wide, _ = name.partition("-wide")
    return make_wide(family, directory, 0) if is_wide else make_tiny(family, directory, 0)


def group_of(name: str) -> OneOfTwo | None:
    """The group of which a name is one rank."""
    _, _, rank = name.partition("-rank")
    return OneOfTwo(int(rank)) if rank else None


def dry_run(directory: Path, group: OneOfTwo | None = None) -> dict[str, int]:
    """Run the model in `directory`, or this rank's part. Returns how much was looked at. Raises GpuFault for
    what a GPU would punish."""
    package, mla = stand_in.flashinfer_module()
    modules = {"flashinfer": package, "flashinfer.mla": mla}
    config = EngineConfig(str(directory), dtype="bfloat16", device="meta", attention="torch", overlap=False)
    with (
        patch.object(loader, "_fingerprint", return_value="dry run"),
        patch.object(loader, "takes_stored_weights", return_value=True),
        patch.object(loader, "dequantise_parameters"),  # no module is replaced on "meta": below
        patch.object(triton_kernels, "available", return_value=True),
        patch.dict(sys.modules, modules),
    ):
        loaded = loader.load_model(config, group)
        with FakeCuda() as device, patch.object(stand_in, "capturing", lambda: device.is_capturing):
            on_fake_cuda(loaded.model)
            on_cuda = EngineConfig(str(directory), dtype="bfloat16", device="cuda", overlap=False)
            groups = fitted(loaded.spec.groups, on_cuda)
            loaded = replace(loaded, spec=replace(loaded.spec, groups=groups))
            pools = _pools(loaded, 1 if group is None else group.size)
            kept: set[str] = set()
            apply_replacements(loaded.model, on_cuda, replacement_table(on_cuda, kept))
            dequantise_parameters(loaded.model)
            recorder = FakeRecorder(device)
            if group is not None and group.rank:
                rank = ModelPart(loaded, pools, LoadPart(on_cuda, group.rank, group.size), group)
                rank.forward.attention = stand_in.flashinfer_layers(loaded, pools)
                rank.record_decode(LIMITS, recorder)
                _steps(RankEngine(loaded.spec, rank))
            else:
                ranks: Any = None if group is None else DeafRanks(group)
                runner = ModelRunner(loaded, pools, on_cuda, HostCompletions(), ranks)
                runner.forward.attention = stand_in.flashinfer_layers(loaded, pools)
                runner.record_decode(LIMITS, recorder)
                _steps(runner)
            if not recorder.replays:
                raise GpuFault("no decode step was replayed from a graph")
            regions = _regions(pools) if group is None else _spread_regions(loaded.spec.groups, group)
            batches = sum(_staged_batches(region) for region in regions)
            seen = {**device.seen, "replays": recorder.replays, "staged batches": batches}
            return {**seen, "stored formats": len(kept)}


def _pools(loaded: loader.LoadedModel, ranks: int) -> dict[str, Any]:
    return {spec.name: _pool(rank_spec(spec, ranks)) for spec in loaded.spec.groups}


def _pool(spec: GroupSpec) -> KVCache:
    return open_pool(spec, PAGES, PAGE, device="cuda:0")


def _regions(pools: Mapping[str, KVCache]) -> list[GroupRegion]:
    return [_region(pool) for pool in pools.values() if pool.page_bytes]


def _region(pool: KVCache) -> GroupRegion:
    return GroupRegion(pool.bytes, copies=CudaCopies(pool.bytes.device))


def _spread_regions(specs: Sequence[GroupSpec], group: OneOfTwo) -> list[GroupRegion]:
    """The pools of a worker of several ranks, as if all were on one GPU."""
    regions: list[GroupRegion] = []
    for spec in specs:
        own = _pool(rank_spec(spec, group.size)), _pool(rank_spec(spec, group.size))
        whole = pool_of_parts(spec, own)
        if whole.page_bytes:
            regions.append(spread_region(whole, tuple(_region(part) for part in own)))
    return regions


def _staged_batches(region: GroupRegion) -> int:
    """Batches in which all pages of a region go to the host and back. What is cuda_ipc's cannot be run here:
    it copies between addresses, which fake tensors do not have."""
    with patch.object(kvtransfer.region, "_staged", lambda stage, _: stage):
        ways = region.to_host(as_pages(range(PAGES))), region.from_host(as_pages(range(PAGES)))
        return sum(len(list(batches)) for batches in ways)


def _steps(runner: Any) -> None:
    """Prompts in chunks, mixed batches, then decode alone, one step ahead of the results."""
    driver = Driver(runner, PAGES, PAGE)
    lanes = [driver.add(list(range(1, 20 + 9 * i)), params) for i, params in enumerate(PARAMS)]
    first, *rest = lanes
    runner.issue(driver.batch([(first, first.prompt_len)]))
    for _ in range(2):
        chunks = [(lane, min(10, len(lane.context) - lane.done)) for lane in rest]
        runner.issue(driver.batch([(first, 1), *chunks], unknown=True))
    for lane in rest:
        runner.issue(driver.batch([(lane, len(lane.context) - lane.done)]))
    for _ in range(3):
        runner.issue(driver.batch([(lane, 1) for lane in lanes], unknown=True))
    runner.issue(driver.batch([(lane, 1) for lane in rest], unknown=True))
    runner.issue(largest_batch(runner.spec, largest_lens(70, 40, LIMITS.sequences), PAGE))


def main() -> int:
    parser = ExactParser(prog="python -m tools.gpu_dry_run", description=__doc__)
    parser.add_argument("families", nargs="*", default=NAMES, help="default: all")
    faults = 0
    with tempfile.TemporaryDirectory() as directory:
        for family in parser.parse_args().families:
            path = make_model(family, Path(directory))
            try:
                seen = dry_run(path, group_of(family))
            except AssertionError as fault:  # GpuFault, or what a stand-in found
                faults += 1
                print(f"{family:20} {fault}")
            else:
                print(f"{family:20} ok: " + ", ".join(f"{count} {what}" for what, count in seen.items()))
    return 1 if faults else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
