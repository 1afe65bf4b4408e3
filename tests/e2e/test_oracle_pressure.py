"""Law number one while memory is short: requests are retracted, and every group gives up what it can.

A real scheduler, real memory and a real engine in one process, so that a test can see who evicts and when.
Free memory is spoilt before every forward: who reads a page or a state that was given up answers wrongly.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.batch import ForwardBatch, Pending
from engine.runner import ModelRunner
from kvcache.memory import Memory
from kvcache.pool import MambaPool
from kvcache.radix_tree import RadixTree
from scheduler.config import Phase
from scheduler.req import Req, RequestLimits
from tests.harness.local_stack import stack
from tests.scheduler.rig import Recorder
from tests.support.oracle import EVERY, HYBRID, WINDOWED
from tests.support.reference import draw_model, reference_generate
from wire.request import GenerateRequest, SamplingParams
from worker.build import build_engine, build_scheduler
from worker.options import WorkerOptions

CONTEXT = 256


class SpoiltMemory:
    """An engine that overwrites everything free before each forward."""

    def __init__(self, runner: ModelRunner, memory: Memory) -> None:
        self._runner = runner
        self._memory = memory
        self.spec = runner.spec

    def launch(self, batch: ForwardBatch) -> Pending:
        for name, allocator in self._memory.allocators.items():
            free = torch.from_numpy(np.concatenate((allocator.free_pages, allocator.release_pages))).long()
            pool = self._memory.kv_caches[name]
            if isinstance(pool, MambaPool):
                pool.bytes[free] = 255  # NaN
            else:
                pool.data[free] = 50.0
        return self._runner.launch(batch)

    def close(self) -> None:
        self._runner.close()


class Worker:
    """One colocated worker's scheduler, stepped here."""

    def __init__(self, model: Path, **options: object) -> None:
        worker = WorkerOptions(
            model=str(model), served_model_name="m", dtype="float32", threads=1,
            max_context_tokens=CONTEXT, mamba_track_interval=32, **options,
        )  # fmt: skip
        runner, self.memory = build_engine(worker, reserves=False)
        assert isinstance(runner, ModelRunner)
        self.engine = SpoiltMemory(runner, self.memory)
        self.policy = Recorder()
        self.scheduler = build_scheduler(worker, self.memory, self.engine, self.policy, frozenset(Phase))
        self._limits = RequestLimits(CONTEXT, runner.spec.vocab_size, ())
        self._rooms = 0

    def add(self, prompt: list[int], outputs: int) -> int:
        """Its room."""
        self._rooms += 1
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=outputs)
        tokens = np.asarray(prompt, dtype="<i4").tobytes()
        request = GenerateRequest(
            request_id=str(self._rooms), room=self._rooms, epoch=1, prompt=tokens, sampling=sampling
        )
        self.scheduler.add(Req.from_request(request, "m", self._limits))
        return self._rooms

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Step until idle, or so; every pool balances after every step."""
        steps = 0
        while not self.scheduler.idle and not until():
            assert self.scheduler.step(), "a step did nothing though the scheduler is not idle"
            self.scheduler.check_memory()
            steps += 1
            assert steps < 5000, "no end in sight"

    def close(self) -> None:
        """Nothing is held any more."""
        report = self.scheduler.check_memory()
        assert report.held_rows == report.held_pages == report.protected_pages == 0
        assert all(group.held == group.protected == 0 for group in report.groups.values())
        self.engine.close()
        self.memory.close()


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(256) for _ in range(count)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pressure")


def cases(families: tuple[str, ...], chosen: tuple[str, ...]) -> list[object]:
    """Both depths and page sizes with every family, in turn; `make test` takes the chosen ones at one."""
    made = []
    for i, family in enumerate(families):
        for j, (depth, page_size) in enumerate([(i % 2, (1, 16)[i // 2 % 2]), ((i + 1) % 2, 16)]):
            mark = pytest.mark.oracle if j == 0 and family in chosen else pytest.mark.oracle_full
            made.append(
                pytest.param(
                    family, depth, page_size, id=f"{family}-depth{depth}-page{page_size}", marks=mark
                )
            )
    return made


@pytest.mark.parametrize(("family", "depth", "page_size"), cases(EVERY, ("gpt_oss", "deepseek_v3")))
def test_oracle_retraction(family: str, depth: int, page_size: int, directory: Path) -> None:
    """Ten requests that outgrow the pool together: some lose their memory in mid-decode and go on later."""
    rng = random.Random(5)
    shared = tokens(rng, 32)
    prompts = [(shared if i % 3 == 0 else []) + tokens(rng, 20 + 5 * i) for i in range(10)]
    path, answers = draw_model(family, directory, 1, prompts, 48)
    worker = Worker(
        path, page_size=page_size, overlap_depth=depth, max_total_tokens=512, chunked_prefill_size=20,
        decode_reserve_tokens=0, max_running_requests=8, swa_full_tokens_ratio=0.8,
    )  # fmt: skip
    rooms = [worker.add(prompt, 48) for prompt in prompts]
    worker.run()
    assert [worker.policy.outputs[room] for room in rooms] == answers
    assert worker.scheduler.metrics.retracted > 0
    worker.close()


@pytest.mark.oracle_full
@pytest.mark.parametrize(
    "family", ["qwen3", "deepseek_v3", "gemma3_text", "gpt_oss", "qwen3_next", "falcon_h1", "lfm2"]
)
def test_oracle_retraction_apart(family: str, directory: Path, tmp_path: Path) -> None:
    """The same with prefill elsewhere: who is retracted is prefilled again where it decodes."""
    rng = random.Random(7)
    prompts = [tokens(rng, 20 + 4 * i) for i in range(10)]
    path, answers = draw_model(family, directory, 1, prompts, 64)
    with stack(
        path, tmp_path, router={"prefill_on_decode_tokens": 0, "max_queued": 0}, dtype="float32", threads=1,
        page_size=16,
        kv_transfer_backend="shm", max_total_tokens=512, max_context_tokens=CONTEXT, mamba_track_interval=32,
        chunked_prefill_size=20, decode_reserve_tokens=0, max_running_requests=8,
    ) as served:  # fmt: skip
        asked = served.generate_all(prompts, 64)
        assert [answer["output_ids"] for answer in asked] == answers
        assert served.inspect(served.decode[0], "metrics")["retracted"] > 0
        served.settle()


AMPLE = {"swa_full_tokens_ratio": 1.0, "max_mamba_cache_size": 200}
TIGHT = {"swa_full_tokens_ratio": 0.4, "max_mamba_cache_size": 14}


@pytest.mark.parametrize(("family", "depth", "page_size"), cases(EVERY, ("falcon_h1",)))
def test_oracle_eviction(
    family: str, depth: int, page_size: int, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two long answers hold their locks while forty short requests, many of them cousins, push each other
    out: pages of the primary group first, then windows or states where there are any."""
    rng = random.Random(6)
    shared = [tokens(rng, count) for count in (48, 33, 80)]
    long = [shared[0] + tokens(rng, 21), tokens(rng, 50)]
    path, answers = draw_model(family, directory, 1, long, 120)
    short = [rng.choice(shared)[: rng.randint(8, 80)] + tokens(rng, rng.randint(1, 40)) for _ in range(40)]
    evicts = {"full": AMPLE}
    if family in WINDOWED:
        evicts["window"] = TIGHT
    if family in HYBRID:
        evicts["state"] = TIGHT
    for kind, sizes in evicts.items():
        evicted = count_evicted(kind, monkeypatch)
        worker = Worker(
            path, page_size=page_size, overlap_depth=depth, max_total_tokens=640, chunked_prefill_size=20,
            max_running_requests=4, **sizes,
        )  # fmt: skip
        rooms = [worker.add(prompt, 120) for prompt in long]
        worker.run(until=lambda rooms=rooms, worker=worker: all(worker.policy.outputs.get(r) for r in rooms))
        asked = {worker.add(prompt, 8): prompt for prompt in short}
        worker.run()
        assert [worker.policy.outputs[room] for room in rooms] == answers
        for room, prompt in asked.items():
            assert worker.policy.outputs[room] == reference_generate(path, prompt, 8)[0]
        assert sum(evicted) > 0, f"no {kind} page was evicted"
        assert worker.scheduler.metrics.cached_tokens > 0
        worker.close()


def count_evicted(kind: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What each eviction of that kind of group frees from now on, while somebody holds a lock.

    "full" means the primary group, whatever its name is.
    """
    method = RadixTree.evict
    evicted = []

    def evict(tree: RadixTree, group: str, pages: int) -> int:
        primary = tree.components[0].name
        locked = tree.protected(primary) > 0
        freed = method(tree, group, pages)
        if locked and (kind == group or (kind == "full" and group == primary)):
            evicted.append(freed)
        return freed

    monkeypatch.setattr(RadixTree, "evict", evict)
    return evicted
