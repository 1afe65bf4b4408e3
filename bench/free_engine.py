"""FreeEngine: an Engine whose device work costs nothing, for bench.host."""

from __future__ import annotations

import torch

from engine.batch import BatchResult, ForwardBatch
from engine.device_copies import FetchedTensor
from engine.last_tokens import LastTokens
from engine.launch import Launched, LaunchQueue, Read
from engine.sampler import Sampler
from engine.spec import ModelSpec

_VOCAB = 64


class FreeEngine:
    """Runs no layers. Everything that a step does on the host around them is real: the last tokens, the
    sampler's tables and launches (over logits of 64 tokens, so that its operators cost their launch), its one
    copy, and the result.
    """

    grammars = None

    def __init__(self, spec: ModelSpec, most_rows: int) -> None:
        self.spec = spec
        self._logits = torch.randn(most_rows, _VOCAB, generator=torch.Generator().manual_seed(0))
        self._sampler = Sampler(_VOCAB, torch.device("cpu"))
        self._last_tokens = LastTokens()
        self._queue = LaunchQueue(overlap=False)

    def launch(self, batch: ForwardBatch) -> Launched:
        """Sample from the same logits in every step."""
        return self._queue.launch(lambda: self._run(batch))

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
