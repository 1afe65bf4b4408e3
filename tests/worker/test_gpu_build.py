"""On a GPU, KV takes what is left of the worker's share after the largest forward, which really runs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock, Timeout

import worker.gpu_build
from common.errors import ConfigError
from common.options import parse_options
from engine.backends.pick import BackendUnavailable
from engine.batch import ForwardBatch
from engine.config import EngineConfig
from engine.launch import Launched
from engine.loader import load_model
from engine.paged_layers import PagedLayers
from engine.runner import ModelRunner
from kvcache.divided import DividedKVCache
from kvcache.layout import pages_in, rank_spec
from kvcache.memory import Memory
from tests.support.tiny_models import make_tiny
from worker.capacity import chosen_config
from worker.gpu_build import build_on_gpu
from worker.options import WorkerOptions

MIB = 1 << 20
BESIDE = 2 * MIB
"""What the weights and the largest forward of the fake GPU take."""


class FakeGpu:
    """16 MiB, some of it in use."""

    names = ("GPU-of-test_gpu_build",)
    total = 16 * MIB
    lock = Path(tempfile.gettempdir()) / f"baton-gpu-{os.getuid()}-{names[0]}.lock"

    def __init__(self, in_use: int = 0) -> None:
        self.in_use = in_use
        self.pools: Callable[[], int] = lambda: 0  # bytes of the pools that are allocated
        self.asked = 0
        self.was_locked = True
        self.gave_back = False

    def free(self) -> int:
        self.asked += 1
        self.was_locked &= is_locked(self.lock)
        return self.total - self.in_use - (0 if self.asked == 1 else BESIDE + self.pools())

    def give_back(self) -> None:
        self.gave_back = True


def is_locked(path: Path) -> bool:
    other = FileLock(path, timeout=0, fallback_to_soft=False)
    try:
        other.acquire()
    except Timeout:
        return True
    other.release()
    return False


class Watch:
    """The memories that are built, and the batches that are launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memories: list[Memory] = []
        self.batches: list[ForwardBatch] = []
        build, launch = worker.gpu_build.build_memory, ModelRunner.launch

        def watched_build(*args: Any) -> Memory:
            self.memories.append(build(*args))
            return self.memories[-1]

        def watched_launch(runner: ModelRunner, batch: ForwardBatch) -> Launched:
            self.batches.append(batch)
            return launch(runner, batch)

        monkeypatch.setattr(worker.gpu_build, "build_memory", watched_build)
        monkeypatch.setattr(ModelRunner, "launch", watched_launch)

    def pools(self) -> int:
        return sum(pool.nbytes for memory in self.memories[-1:] for pool in memory.kv_caches.values())


def start(path: Path, gpu: FakeGpu, **options: Any) -> Memory:
    given = {"max_running_requests": 6, "chunked_prefill_size": 64, **options}
    worker_options = parse_options(WorkerOptions, {"model": str(path), "device": "cpu", **given})
    config = EngineConfig(str(path), dtype="float32", attention="torch", linear="torch")
    runner, memory = build_on_gpu(worker_options, config, chosen_config(worker_options, False, "cpu"), gpu)
    runner.close()
    memory.close()
    return memory


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_the_largest_forward_runs_and_kv_takes_the_rest(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, watch = FakeGpu(in_use=MIB), Watch(monkeypatch)
    gpu.pools = watch.pools
    memory = start(make_tiny(family, tmp_path, 0), gpu, gpu_memory_utilization=0.25)
    for batch in watch.batches:
        assert batch.q_lens.tolist() == [64, 1, 1, 1, 1, 1]
        assert len(batch.sampled) == 6
    sizes = memory.config
    budget = gpu.total // 4 - BESIDE
    assert memory.num_pages == pages_in(
        budget, memory.specs, 16, sizes.swa_full_tokens_ratio, sizes.num_state_slots
    )
    assert gpu.gave_back
    assert gpu.was_locked
    assert not is_locked(gpu.lock)


@pytest.mark.parametrize(
    ("options", "longest"),
    [({}, 2048), ({"max_context_tokens": 300}, 288), ({"max_running_requests": 1}, 2048)],
)
def test_plain_torch_also_runs_with_the_longest_contexts(
    options: dict[str, int], longest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs more memory the longer a context is."""
    gpu, watch = FakeGpu(), Watch(monkeypatch)
    gpu.pools = watch.pools
    start(make_tiny("qwen3", tmp_path, 0), gpu, **options)
    first, second = watch.batches
    assert first.seq_lens.tolist() == first.q_lens.tolist() == second.q_lens.tolist()
    assert second.seq_lens[0] == longest


def test_no_context_is_longer_than_all_free_memory_would_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, watch = FakeGpu(in_use=13 * MIB), Watch(monkeypatch)
    gpu.pools = watch.pools
    memory = start(make_tiny("qwen3", tmp_path, 0), gpu)
    page_bytes = memory.specs[0].page_bytes(16)
    assert watch.batches[1].seq_lens.max() == (MIB // page_bytes - 1) * 16 < 2048


def test_a_backend_whose_memory_does_not_grow_with_the_context_runs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, watch = FakeGpu(), Watch(monkeypatch)
    gpu.pools = watch.pools
    monkeypatch.setattr(PagedLayers, "recordable", True)
    monkeypatch.setattr(ModelRunner, "record_decode", lambda *_: None)
    start(make_tiny("qwen3", tmp_path, 0), gpu)
    assert [batch.seq_lens.max() for batch in watch.batches] == [64]


def test_memory_of_others_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, watch = FakeGpu(in_use=13 * MIB), Watch(monkeypatch)
    gpu.pools = watch.pools
    memory = start(make_tiny("qwen3", tmp_path, 0), gpu)
    assert memory.num_pages == pages_in(MIB, memory.specs, 16)


def test_of_two_ranks_each_gpu_holds_half_of_every_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two processes; what is measured is of one GPU."""
    gpu, watch = FakeGpu(in_use=MIB), Watch(monkeypatch)
    gpu.pools = lambda: watch.pools() // 2
    monkeypatch.setattr("kvcache.memory.one_memory", lambda devices: False)
    memory = start(make_tiny("qwen3", tmp_path, 0), gpu, gpu_memory_utilization=0.25, tp_size=2)
    own = tuple(rank_spec(spec, 2) for spec in memory.specs)
    assert memory.num_pages == pages_in(gpu.total // 4 - BESIDE, own, 16)
    (pool,) = memory.kv_caches.values()
    assert isinstance(pool, DividedKVCache)
    assert [part.nbytes for part in pool.parts] == [pool.nbytes // 2] * 2


def test_the_host_tier_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where capacity is measured: it may be most of the host's memory, and it opens storage."""
    gpu, watch = FakeGpu(), Watch(monkeypatch)
    gpu.pools = watch.pools
    start(make_tiny("qwen3", tmp_path, 0), gpu, hicache_size=0.001)
    measured, real = watch.memories
    assert measured.tiers is None
    assert real.host_tokens > 0


def test_a_share_that_forwards_fill_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, watch = FakeGpu(), Watch(monkeypatch)
    gpu.pools = watch.pools
    with pytest.raises(ConfigError, match="not even one page of KV fits"):
        start(make_tiny("qwen3", tmp_path, 0), gpu, gpu_memory_utilization=0.1)


@pytest.mark.parametrize(("family", "page_size"), [("qwen3", 16), ("gpt_oss", 1), ("qwen3_next", 16)])
def test_a_given_capacity_is_not_measured_but_a_prompt_runs(
    family: str, page_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer compiles kernels for it. Requests come later, and a step of theirs may not take so long."""
    gpu, watch = FakeGpu(), Watch(monkeypatch)
    path = make_tiny(family, tmp_path, 0)
    slots = {"max_mamba_cache_size": 8} if family == "qwen3_next" else {}
    memory = start(path, gpu, max_total_tokens=320, page_size=page_size, **slots)
    assert (memory.num_pages, gpu.asked) == (320 // page_size, 2)  # before and after loading
    assert [batch.q_lens.tolist() for batch in watch.batches] == [[2]]
    memory.check_memory()


@pytest.mark.parametrize("capacity", [{}, {"max_total_tokens": 320}])
def test_prompts_of_all_sizes_run_where_weights_stay_stored(
    capacity: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each number of rows that a program multiplies there is a kernel, which is compiled at first use."""
    gpu, watch = FakeGpu(), Watch(monkeypatch)
    gpu.pools = watch.pools
    stored = lambda config: replace(load_model(config), kept=("fp8",))  # noqa: E731
    monkeypatch.setattr("engine.model_ranks.load_model", stored)
    start(make_tiny("gpt_oss", tmp_path, 0), gpu, **capacity)
    last = [batch.q_lens.tolist() for batch in watch.batches[-6:]]
    assert last == [[2], [4], [8], [16], [32], [64]]


def test_a_prompt_that_does_not_run_names_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(runner: ModelRunner, batch: ForwardBatch) -> None:
        raise RuntimeError("nvcc was not found")

    monkeypatch.setattr(ModelRunner, "issue", fail)
    with pytest.raises(ConfigError, match=r"a prompt does not run .*nvcc") as refused:
        start(make_tiny("qwen3", tmp_path, 0), FakeGpu(), max_total_tokens=320)
    assert refused.value.key == "attention_backend"


def test_a_largest_step_that_does_not_run_names_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(runner: ModelRunner, batch: ForwardBatch) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(ModelRunner, "issue", fail)
    with pytest.raises(ConfigError, match=r"a step of 69 tokens .*does not run .*out of memory"):
        start(make_tiny("qwen3", tmp_path, 0), FakeGpu())


@pytest.mark.parametrize("capacity", [{}, {"max_total_tokens": 320}])
def test_a_step_that_a_backend_would_refuse_names_its_key(
    capacity: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer says it when the step is planned: with a given capacity that would be in the middle of
    serving."""

    def refuse(_layers: PagedLayers, tokens: int, sequences: int) -> None:
        if tokens > 68:
            raise BackendUnavailable(f"not more than 68 for {sequences}")

    monkeypatch.setattr(PagedLayers, "check_step", refuse)
    path = make_tiny("deepseek_v3", tmp_path, 0)
    with pytest.raises(ConfigError, match=r"a step of 69 tokens in 6 .*more than 68") as refused:
        start(path, FakeGpu(), **capacity)
    assert refused.value.key == "chunked_prefill_size"
    start(path, FakeGpu(), max_total_tokens=64)  # all of its tokens are no more than a step may have


def test_decode_steps_that_cannot_be_recorded_name_their_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("Failed to allocate memory for batch_prefill_tmp_v")

    monkeypatch.setattr(ModelRunner, "record_decode", fail)
    with pytest.raises(ConfigError, match=r"up to 6 requests cannot be recorded .*tmp_v") as refused:
        start(make_tiny("qwen3", tmp_path, 0), FakeGpu())
    assert refused.value.key == "max_running_requests"


def test_whoever_starts_on_the_same_gpu_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker.gpu_build, "_ALONE_TIMEOUT_S", 0.2)
    with (
        FileLock(FakeGpu.lock, fallback_to_soft=False),
        pytest.raises(ConfigError, match="another worker has been starting on the same GPU"),
    ):
        start(tmp_path, FakeGpu())
