"""ModelRunner: an Engine over a transformers model."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

import engine.sampler as sampler
from engine.backends.choose import build_attention
from engine.batch import BatchResult, ForwardBatch
from engine.config import EngineConfig
from engine.last_tokens import LastTokens
from engine.launch import Launched, LaunchQueue
from engine.loader import LoadedModel
from engine.paged_cache import PagedCache
from kvcache.pool import MHAKVCache


@dataclass(slots=True)
class RunnerCounters:
    """What the runner has done since it started; written by the thread that runs forwards."""

    steps: int = 0
    tokens: int = 0  # new tokens computed
    sampled: int = 0
    model_s: float = 0.0  # preparing, the decoder and lm_head
    sample_s: float = 0.0


class ModelRunner:
    """See engine.batch.Engine. `pool` holds the pages of the model's one KV group."""

    def __init__(self, loaded: LoadedModel, pool: MHAKVCache, config: EngineConfig) -> None:
        if config.threads:
            torch.set_num_threads(config.threads)
        self.spec = loaded.spec
        self.counters = RunnerCounters()
        self.attention = build_attention(config, pool, loaded.query_heads, loaded.scale)
        self._decoder = getattr(loaded.model, loaded.model.base_model_prefix)
        self._lm_head = loaded.model.lm_head
        self._device = torch.device(config.device)
        self._cache = PagedCache()
        self._last_tokens = LastTokens()
        self._queue = LaunchQueue(config.overlap)

    def launch(self, batch: ForwardBatch) -> Launched:
        """See Engine."""
        return self._queue.launch(lambda: self._run(batch))

    def close(self) -> None:
        """See Engine."""
        self._queue.close()

    def _run(self, batch: ForwardBatch) -> BatchResult:
        started = time.perf_counter()
        with torch.inference_mode():
            logits = self._logits(batch)
            computed = time.perf_counter()
            result = sampler.sample(logits, batch.sampling)
        self._last_tokens.record(batch, result.tokens)
        counters = self.counters
        counters.steps += 1
        counters.tokens += len(batch.input_ids)
        counters.sampled += len(result.tokens)
        counters.model_s += computed - started
        counters.sample_s += time.perf_counter() - computed
        return result

    def _logits(self, batch: ForwardBatch) -> torch.Tensor:
        """[N, vocab] of the sampled sequences' last tokens; the others never go through lm_head."""
        input_ids = self._to_device(self._last_tokens.resolve(batch))
        self.attention.prepare(batch)
        output = self._decoder(
            input_ids=input_ids[None],
            position_ids=self._to_device(batch.positions)[None],
            past_key_values=self._cache,
            use_cache=False,
            paged=self.attention,
        )
        last = batch.starts()[1:][batch.sampled] - 1
        hidden: torch.Tensor = output.last_hidden_state[0, self._to_device(last)]
        logits: torch.Tensor = self._lm_head(hidden)
        return logits

    def _to_device(self, array: np.ndarray[tuple[int], np.dtype[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
