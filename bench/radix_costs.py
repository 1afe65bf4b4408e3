"""The cost of the radix tree for short requests, and what hits save: `python -m bench.radix_costs --json`.

Many short requests through a real scheduler whose engine returns at once: 64 running, prompts of at most 256
tokens, 9 of 10 continue the first half or more of an earlier prompt with other tokens (so that nodes split),
16 tokens of output, a pool small enough to evict. They are compared with the same requests without prefix
caching. `values`, per request, with suffixes _p1, _p16, _p64 for the page size:

    none_us        scheduler time without the tree
    tree_us        scheduler time with the tree minus none_us; split_us and indices_us are parts of it
    split_us       splitting nodes
    indices_us     joining the page ids of the matched nodes and expanding them to slots
    splits         nodes split
    nodes_per_hit  nodes on a hit's path
    hit_tokens     tokens that need no forward
    break_even_tok_s  prefill speed above which the tree costs more time than it saves: hit_tokens / tree_us

With --engine also prefill_tok_s, the prefill speed of shape M here in bfloat16, and saved_ms_pN: the time of
hit_tokens at that speed.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import alternate, argument_parser, medians, print_result
from bench.engine_rig import EngineRig
from bench.make_model import make_model
from bench.scheduler import DecodeHere, InstantEngine
from engine.fake import fake_spec
from kvcache.config import CacheConfig
from kvcache.memory import build_memory
from kvcache.radix_cache import RadixCache
from kvcache.tree_node import TreeNode
from scheduler.config import SchedulerConfig
from scheduler.req import Req, RequestLimits
from scheduler.scheduler import Scheduler
from wire.request import GenerateRequest, SamplingParams

PAGE_SIZES = (1, 16, 64)
RUNNING = 64
REQUESTS = 1500
WARM = 500  # requests before the clock starts
PROMPT = 256
OUTPUTS = 16
POOL_TOKENS = 1 << 16
VOCAB = 32_000
ROUNDS = 5


def prompts(count: int, seed: int) -> list[list[int]]:
    """Short prompts; most of them continue a part of an earlier one."""
    rng = random.Random(seed)

    def words(most: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(rng.randint(8, most))]

    made = [words(PROMPT) for _ in range(64)]
    while len(made) < count:
        start: list[int] = []
        if rng.random() < 0.9:
            earlier = made[rng.randrange(max(0, len(made) - 512), len(made))]
            start = earlier[: rng.randint(len(earlier) // 2, len(earlier))]
        made.append((start + words(64))[:PROMPT])
    return made


class Spent:
    """The calls of a method and their time, while a `with` block runs."""

    def __init__(self) -> None:
        self.calls = 0
        self.seconds = 0.0
        self.size = 0  # sum of the first argument's lengths

    @contextmanager
    def on(self, owner: Any, name: str) -> Iterator[None]:
        """Count the calls of `owner.name`."""
        method: Callable[..., Any] = getattr(owner, name)

        def watched(this: Any, first: Any, *rest: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(this, first, *rest)
            finally:
                self.seconds += time.perf_counter() - started
                self.calls += 1
                self.size += len(first) if isinstance(first, list) else 0

        setattr(owner, name, watched)
        try:
            yield
        finally:
            setattr(owner, name, method)


class Load:
    """A scheduler that gets these requests; each round begins with an empty cache."""

    def __init__(self, page_size: int, prefix_cache: str, asked: list[list[int]]) -> None:
        self._page_size = page_size
        self._prefix_cache = prefix_cache
        self._asked = asked
        self.cached = 0

    def run(self) -> float:
        """Microseconds of this process's CPU time per request: nothing but the scheduler runs."""
        scheduler = self._scheduler()
        limits = RequestLimits(PROMPT + OUTPUTS, VOCAB, ())
        for room, prompt in enumerate(self._asked):
            if room == WARM:
                self._until_idle(scheduler)
                before, started = scheduler.metrics.cached_tokens, time.process_time()
            tokens = np.asarray(prompt, "<i4").tobytes()
            sampling = SamplingParams(max_new_tokens=OUTPUTS)
            request = GenerateRequest(
                request_id=str(room), room=room, epoch=1, prompt=tokens, sampling=sampling
            )
            scheduler.add(Req.from_request(request, "m", limits))
            while room - scheduler.metrics.finished > 2 * RUNNING:
                scheduler.step()
        self._until_idle(scheduler)
        timed = len(self._asked) - WARM
        self.cached = (scheduler.metrics.cached_tokens - before) // timed
        return (time.process_time() - started) / timed * 1e6

    def _scheduler(self) -> Scheduler:
        spec = fake_spec(vocab_size=VOCAB, max_position=PROMPT + OUTPUTS)
        sizes = CacheConfig(
            total_tokens=POOL_TOKENS,
            max_context_len=PROMPT + OUTPUTS,
            max_running_requests=RUNNING,
            page_size=self._page_size,
            prefix_cache=self._prefix_cache,
        )
        memory = build_memory(sizes, spec.groups)
        config = SchedulerConfig(model="m", max_running_requests=RUNNING)
        return Scheduler(memory, InstantEngine(spec), DecodeHere(), config)

    def _until_idle(self, scheduler: Scheduler) -> None:
        while not scheduler.idle:
            scheduler.step()


def costs(page_size: int, asked: list[list[int]]) -> dict[str, float]:
    """The values of one page size, without its suffix."""
    tree, none = Load(page_size, "radix", asked), Load(page_size, "none", asked)
    measured = medians(alternate({"tree": tree.run, "none": none.run}, ROUNDS))
    splits, indices = Spent(), Spent()
    with splits.on(TreeNode, "split"), indices.on(RadixCache, "_result"):
        tree.run()
    tree_us = measured["tree"] - measured["none"]
    all_requests = len(asked)
    return {
        "none_us": measured["none"],
        "tree_us": tree_us,
        "split_us": splits.seconds / all_requests * 1e6,
        "indices_us": indices.seconds / all_requests * 1e6,
        "splits": splits.calls / all_requests,
        "nodes_per_hit": indices.size / max(1, indices.calls),
        "hit_tokens": float(tree.cached),
        "break_even_tok_s": tree.cached / max(tree_us, 1.0) * 1e6,
    }


def prefill_speed(threads: int) -> float:
    """Prompt tokens a second of shape M in bfloat16."""
    with tempfile.TemporaryDirectory() as scratch:
        make_model(Path(scratch))
        with EngineRig(scratch, threads) as rig:
            rig.prefill(PROMPT)
            return PROMPT / min(rig.prefill(PROMPT) for _ in range(ROUNDS))


def main() -> None:
    """Command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--engine", action="store_true", help="measure shape M's prefill too")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    asked = prompts(WARM + REQUESTS, seed=1)
    values = {
        f"{name}_p{page_size}": round(value, 2)
        for page_size in PAGE_SIZES
        for name, value in costs(page_size, asked).items()
    }
    if options.engine:
        values["prefill_tok_s"] = speed = round(prefill_speed(options.threads))
        for page_size in PAGE_SIZES:
            values[f"saved_ms_p{page_size}"] = round(values[f"hit_tokens_p{page_size}"] / speed * 1e3, 2)
    print_result("radix_costs", {}, values, options.json)


if __name__ == "__main__":
    main()
