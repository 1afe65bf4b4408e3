"""A model behind a real scheduler in this process, for bench.floor, bench.states and bench.radix_costs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.scheduler import DecodeHere
from engine.config import EngineConfig
from engine.cpu.decoder import FusedDecoder
from engine.cpu.decoder_call import PARTS
from engine.loader import load_model
from engine.runner import ModelRunner
from kvcache.config import CacheConfig
from kvcache.layout import StateGroupSpec
from kvcache.memory import build_memory
from scheduler.config import SchedulerConfig
from scheduler.metrics import SchedulerMetrics
from scheduler.req import Req, RequestLimits
from scheduler.scheduler import Scheduler
from wire.messages.rooms import RejectKind
from wire.request import GenerateRequest, Grammar, OutputDelta, SamplingParams

Prompt = npt.NDArray[np.int32]

MAX_BATCH = 16
MAX_CONTEXT = 1024


class CountingPolicy(DecodeHere):
    """Counts the tokens of each room."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}
        self.finished: set[int] = set()

    def on_tokens(self, req: Req, start: int, delta: OutputDelta) -> None:
        """Count them."""
        self.tokens[req.room] = start + len(delta.tokens)
        if delta.finish is not None:
            self.finished.add(req.room)

    def on_failed(self, req: Req, why: RejectKind, message: str) -> None:
        """No request of a bench can fail."""
        raise AssertionError(f"room {req.room} failed ({why}): {message}")


class EngineRig:
    """Scheduler, memory and ModelRunner over one model; a context manager."""

    def __init__(
        self, model: str, threads: int, prefix_cache: str = "none", weight_dtype: str = "auto"
    ) -> None:
        config = EngineConfig(model=model, threads=threads, overlap=False, weight_dtype=weight_dtype)
        loaded = load_model(config)
        self.model: Any = loaded.model
        self.hf_config: Any = loaded.model.config
        self._spec = loaded.spec
        sizes = CacheConfig(
            total_tokens=MAX_BATCH * MAX_CONTEXT,
            max_context_len=MAX_CONTEXT,
            max_running_requests=MAX_BATCH,
            prefix_cache=prefix_cache,
        )
        self._memory = build_memory(sizes, loaded.spec.groups)
        for pool in self._memory.kv_caches.values():
            pool.bytes.fill_(0)  # touch every page before anything is timed
        self._runner = ModelRunner(loaded, self._memory.kv_caches, config)
        self._policy = CountingPolicy()
        scheduler_config = SchedulerConfig(
            model="bench", max_running_requests=MAX_BATCH, chunked_prefill_size=None
        )
        self._scheduler = Scheduler(self._memory, self._runner, self._policy, scheduler_config)
        self._rooms = itertools.count(1)
        self._random = np.random.default_rng(0)
        decoder = loaded.model.model
        self._parts: list[float] = []
        self._decoder = decoder if isinstance(decoder, FusedDecoder) else None

    def __enter__(self) -> EngineRig:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()
        self._memory.close()

    def state_bytes(self, context: int) -> int:
        """Bytes that a decode row of `context` tokens reads of its KV, and reads and writes of its states."""
        total = 0
        for spec in self._memory.specs:
            size = self._memory.kv_caches[spec.name].page_bytes
            if isinstance(spec, StateGroupSpec):
                total += 2 * size
            else:
                window = spec.window or context
                total += min(context, window) * size // self._memory.page_size
        return total

    def prefill(self, tokens: int) -> float:
        """Seconds from adding a new random prompt to its first token."""
        return self.prefill_prompt(self.draw(tokens))

    def draw(self, tokens: int) -> Prompt:
        """A prompt of random tokens."""
        return self._random.integers(300, self._spec.vocab_size, tokens).astype("<i4")

    @property
    def metrics(self) -> SchedulerMetrics:
        """The scheduler's counters."""
        return self._scheduler.metrics

    def prefill_prompt(self, prompt: Prompt) -> float:
        """Seconds from adding this prompt to its first token."""
        started = time.perf_counter()
        room = self._add(prompt, 1)
        self._run_until([room], 1)
        return time.perf_counter() - started

    def decode_steps(
        self,
        batch: int,
        context: int,
        steps: int,
        grammar: Grammar | None = None,
        on_prefilled: Callable[[], object] = lambda: None,
    ) -> list[float]:
        """Seconds of each of `steps` decode steps whose contexts are `context` tokens long in the middle.

        `on_prefilled` is called when the contexts have been computed.
        """
        rooms = [self._add(self.draw(context - steps // 2), steps + 2, grammar) for _ in range(batch)]
        self._run_until(rooms, 2)
        on_prefilled()
        times = []
        if self._decoder is not None:
            self._decoder.start_profile()
        for _ in range(steps):
            started = time.perf_counter()
            self._scheduler.step()
            times.append(time.perf_counter() - started)
        if self._decoder is not None:
            self._parts = self._decoder.take_profile()
        while not self._policy.finished.issuperset(rooms):
            self._scheduler.step()
        return times

    def steps_beside(self, context: int, arriving: Sequence[Grammar | None]) -> list[float]:
        """Seconds of steps with four decode rows. Before each of them a request with a prompt of a page and
        one output comes, with this grammar."""
        rooms = [self._add(self.draw(context), len(arriving) + 2) for _ in range(4)]
        self._run_until(rooms, 2)
        times = []
        for grammar in arriving:
            rooms.append(self._add(self.draw(16), 1, grammar))
            started = time.perf_counter()
            self._scheduler.step()
            times.append(time.perf_counter() - started)
        while not self._policy.finished.issuperset(rooms):
            self._scheduler.step()
        return times

    def mixed_step(self, context: int, chunk: int) -> float:
        """Seconds of one step with a decode row of `context` tokens and a new prompt of `chunk` tokens."""
        decoding = self._add(self.draw(context), 4)
        self._run_until([decoding], 2)
        prompt = self._add(self.draw(chunk), 1)
        before = self._policy.tokens[decoding]
        started = time.perf_counter()
        self._scheduler.step()
        spent = time.perf_counter() - started
        assert self._policy.tokens[decoding] == before + 1, "the step did not decode"
        assert prompt in self._policy.finished, "the step did not prefill"
        while decoding not in self._policy.finished:
            self._scheduler.step()
        return spent

    def profile(self, context: int) -> str:
        """A table: milliseconds a step of each part, for decode at batch 1 and 8 and for a prefill."""
        if self._decoder is None:
            return "no profile: the decoder is not fused on this CPU\n"
        lines = [f"{'ms a step':>12} {'all':>8} {'outside':>8} " + " ".join(f"{part:>9}" for part in PARTS)]
        for name, batch in (("decode b1", 1), ("decode b8", 8), ("prefill", 0)):
            if batch:
                times = self.decode_steps(batch, context, 20)
            else:
                self._decoder.start_profile()
                times = [self.prefill(context)]
                self._parts = self._decoder.take_profile()
            step = sum(times) / len(times)
            parts = [part / len(times) for part in self._parts]
            cells = " ".join(f"{part * 1e3:9.2f}" for part in parts)
            lines.append(f"{name:>12} {step * 1e3:8.2f} {(step - sum(parts)) * 1e3:8.2f} {cells}")
        return "\n".join(lines) + "\n"

    def _add(self, prompt: Prompt, output_tokens: int, grammar: Grammar | None = None) -> int:
        room = next(self._rooms)
        request = GenerateRequest(
            request_id=f"bench-{room}",
            room=room,
            epoch=0,
            prompt=prompt.tobytes(),
            sampling=SamplingParams(
                max_new_tokens=output_tokens, temperature=0.0, ignore_eos=True, grammar=grammar
            ),
        )
        limits = RequestLimits(
            MAX_CONTEXT, self._spec.vocab_size, self._spec.eos_token_ids, self._runner.grammars
        )
        self._scheduler.add(Req.from_request(request, "bench", limits))
        return room

    def _run_until(self, rooms: list[int], tokens: int) -> None:
        while any(self._policy.tokens.get(room, 0) < tokens for room in rooms):
            self._scheduler.step()
