"""TierRig: a scheduler, its memory and tiers over a tiny model in this process, for bench.tier_curves."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import Qwen3Config

from bench.engine_rig import CountingPolicy
from bench.make_model import VOCAB_SIZE, make_model
from bench.tier_trace import LONGEST
from engine.config import EngineConfig
from engine.loader import LoadedModel, load_model
from engine.runner import ModelRunner
from kvcache.config import CacheConfig
from kvcache.memory import build_memory
from kvcache.radix_tree import evict_all
from kvcache.tiers.config import TierConfig
from scheduler.config import SchedulerConfig
from scheduler.req import Req, RequestLimits
from scheduler.scheduler import Scheduler
from wire.request import GenerateRequest, OutputDelta, SamplingParams
from wire.stages import RequestStage, now_ns

PAGE_SIZE = 16
DEVICE_TOKENS = 2048
OUTPUT_TOKENS = 4
_BOUND_S = 60.0
_POLL_S = 0.005  # the deadline of a prefetch passes without an event


class Sources(NamedTuple):
    """Where a prompt's tokens came from."""

    prompt: int
    device: int
    host: int
    storage: int

    @property
    def computed(self) -> int:
        """Those that were nowhere."""
        return self.prompt - self.device - self.host - self.storage


class Moved(NamedTuple):
    """Pages that went between tiers, and bytes."""

    to_host: int
    to_device: int
    to_storage: int
    from_storage: int
    to_host_bytes: int
    to_device_bytes: int


class Waited(NamedTuple):
    """A request in time. Seconds since it came."""

    prompt: int
    computed: int
    queue_s: float  # to its first forward
    ttft_s: float


def made_model(directory: Path, hidden: int, layers: int) -> tuple[LoadedModel, EngineConfig]:
    """A model of this width and depth, with one KV head of 64, made and loaded."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=2 * LONGEST,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=258,
        pad_token_id=256,
        dtype=torch.bfloat16,
    )
    make_model(directory, config)
    engine = EngineConfig(model=str(directory), threads=1)
    return load_model(engine), engine


class _Answers(CountingPolicy):
    """Also knows when each room had its first token, as stamps do."""

    def __init__(self) -> None:
        super().__init__()
        self.first_ns: dict[int, int] = {}

    def on_tokens(self, req: Req, start: int, delta: OutputDelta) -> None:
        """See CountingPolicy."""
        self.first_ns.setdefault(req.room, now_ns())
        super().on_tokens(req, start, delta)


class TierRig:
    """A context manager."""

    def __init__(
        self,
        loaded: LoadedModel,
        engine: EngineConfig,
        tiers: TierConfig,
        device_tokens: int = DEVICE_TOKENS,
    ) -> None:
        sizes = CacheConfig(
            total_tokens=device_tokens,
            max_context_len=LONGEST,
            max_running_requests=4,
            page_size=PAGE_SIZE,
            tiers=tiers,
        )
        self._spec = loaded.spec
        self._memory = build_memory(sizes, loaded.spec.groups)
        self._runner = ModelRunner(loaded, self._memory.kv_caches, engine)
        self._policy = _Answers()
        self._scheduler = Scheduler(
            self._memory, self._runner, self._policy, SchedulerConfig(model="bench", max_running_requests=4)
        )
        self._rooms = itertools.count(1)
        self._moved = threading.Event()
        if self._memory.tiers is not None:
            self._memory.tiers.on_done(self._moved.set)

    def __enter__(self) -> TierRig:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()
        self._memory.close()

    # -- one at a time -----------------------------------------------------------------------------

    def ask(self, prompt: Sequence[int]) -> tuple[Sources, list[int]]:
        """Answer a prompt, alone. The tiers come to rest after every step, so that counts are repeatable."""
        before = self.moved()
        req = self._add(prompt, OUTPUT_TOKENS)
        deadline = time.monotonic() + _BOUND_S
        while req.room not in self._policy.finished:
            self._scheduler.step()
            self.come_to_rest()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{req} has no answer")
        self._scheduler.check_memory()
        after = self.moved()
        loaded = (after.to_device - before.to_device) * PAGE_SIZE
        read = min(loaded, (after.from_storage - before.from_storage) * PAGE_SIZE)
        sources = Sources(len(prompt), req.cached_tokens - loaded, loaded - read, read)
        return sources, list(req.output_ids)

    def come_to_rest(self) -> None:
        """Wait until nothing moves between tiers."""
        tiers, deadline = self._memory.tiers, time.monotonic() + _BOUND_S
        while tiers is not None:
            self._moved.clear()
            tiers.poll()
            if tiers.is_idle:
                return
            if not self._moved.wait(max(0.0, deadline - time.monotonic())):
                raise TimeoutError("the tiers do not come to rest")

    def forget(self) -> None:
        """Empty device and host. What is in storage stays."""
        evict_all(self._memory.cache.tree)
        if self._memory.tiers is not None:
            self._memory.tiers.host.clear()

    # -- in time -----------------------------------------------------------------------------------

    def ask_all(self, bursts: Sequence[Sequence[Sequence[int]]], every_s: float = 0.0) -> list[Waited]:
        """Answer prompts. A burst of them comes every so many seconds."""
        waiting, reqs = list(bursts), list[Req]()
        started = time.monotonic()
        bound = started + _BOUND_S + len(bursts) * every_s
        while waiting or not self._policy.finished.issuperset(req.room for req in reqs):
            now = time.monotonic()
            if now > bound:
                raise TimeoutError("requests have no answers")
            if waiting and now >= started + (len(bursts) - len(waiting)) * every_s:
                reqs += [self._add(prompt, 1) for prompt in waiting.pop(0)]
            self._moved.clear()
            if not self._scheduler.step():
                self._moved.wait(_POLL_S)
        self.come_to_rest()
        return [_waited(req, self._policy.first_ns[req.room]) for req in reqs]

    # -- counts ------------------------------------------------------------------------------------

    def moved(self) -> Moved:
        """Since the start."""
        tiers = self._memory.tiers
        if tiers is None:
            return Moved(0, 0, 0, 0, 0, 0)
        counts, at_once, storage = tiers.moves.counts, tiers.host.written_back, tiers.storage
        return Moved(
            counts.to_host_pages + at_once.pages,
            counts.to_device_pages,
            0 if storage is None else storage.counts.written_pages,
            0 if storage is None else storage.counts.read_pages,
            counts.to_host_bytes + at_once.bytes,
            counts.to_device_bytes,
        )

    def _add(self, prompt: Sequence[int], output_tokens: int) -> Req:
        room = next(self._rooms)
        request = GenerateRequest(
            request_id=f"bench-{room}",
            room=room,
            epoch=0,
            prompt=np.array(prompt, "<i4").tobytes(),
            sampling=SamplingParams(max_new_tokens=output_tokens, temperature=0.0, ignore_eos=True),
        )
        limits = RequestLimits(LONGEST, self._spec.vocab_size, self._spec.eos_token_ids)
        req = Req.from_request(request, "bench", limits)
        self._scheduler.add(req)
        return req


def _waited(req: Req, first_ns: int) -> Waited:
    at = {stamp.stage: stamp.at_ns for stamp in reversed(req.stamps)}  # the first of each stage
    came, last = at[RequestStage.PREFILL_WAITING], at[RequestStage.PREFILL_FORWARD]
    begun = at.get(RequestStage.PREFILL_CHUNKED_FORWARD, last)
    computed = req.prompt_len - req.cached_tokens
    return Waited(req.prompt_len, computed, (begun - came) / 1e9, (first_ns - came) / 1e9)
