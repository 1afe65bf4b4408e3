"""FreeEngine: an Engine whose device work costs the host nothing, for bench.host."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from common.polling import poll
from engine.batch import BatchResult, ForwardBatch
from engine.completion import Completion
from engine.device_copies import FetchedTensor
from engine.last_tokens import LastTokens
from engine.launch import Launched, LaunchQueue, Read
from engine.sampler import Sampler
from engine.spec import ModelSpec

_VOCAB = 64


@dataclass(frozen=True)
class Ahead:
    """Steps are launched before the result of the one before is known, on a device that takes `device_s` for
    each. `by_thread`: a thread issues them, as it does what is not a replay."""

    device_s: float
    by_thread: bool = False


class FreeEngine:
    """Runs no layers. Everything that a step does on the host around them is real: the last tokens, the
    sampler's tables and launches (over logits of 64 tokens, so that its operators cost their launch), its one
    copy, and the result.
    """

    grammars = None

    def __init__(self, spec: ModelSpec, most_rows: int, ahead: Ahead | None = None) -> None:
        self.spec = spec
        self._logits = torch.randn(most_rows, _VOCAB, generator=torch.Generator().manual_seed(0))
        self._sampler = Sampler(_VOCAB, torch.device("cpu"))
        self._last_tokens = LastTokens()
        self._is_brief = ahead is None or not ahead.by_thread
        device = None if ahead is None else _TimedDevice(ahead.device_s)
        self._queue = LaunchQueue(overlap=ahead is not None, completions=device)

    def launch(self, batch: ForwardBatch) -> Launched:
        """Sample from the same logits in every step."""
        return self._queue.launch(lambda: self._run(batch), self._is_brief)

    def close(self) -> None:
        """End the queue."""
        self._queue.close()

    def _run(self, batch: ForwardBatch) -> Read:
        with torch.inference_mode(), self._last_tokens.placeholders_on_failure(batch):
            self._last_tokens.resolve(batch)
            positions = torch.from_numpy(batch.sampling.positions)
            logits = self._logits[: len(batch.sampled)]
            sample = self._sampler.sample(logits, batch.sampling, positions)
            self._last_tokens.record(batch, sample.tokens)
            packed = FetchedTensor(sample.packed)

        def read() -> BatchResult:
            sampled = sample.read(packed.numpy())
            return BatchResult(sampled.tokens, sampled.logprobs, sampled.failures)

        return read


class _TimedDevice:
    """Completions of a device that does forwards one after the other, by the clock."""

    def __init__(self, forward_s: float) -> None:
        self._forward_s = forward_s
        self._free_at = 0.0

    def record(self) -> Completion:
        self._free_at = max(time.perf_counter(), self._free_at) + self._forward_s
        return _Due(self._free_at)


@dataclass(frozen=True)
class _Due:
    at: float

    def wait(self, timeout_s: float) -> None:
        if not poll(lambda: time.perf_counter() >= self.at, timeout_s):
            raise TimeoutError
