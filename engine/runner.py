"""ModelRunner: an Engine over a transformers model."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

import engine.sampler as sampler
from engine.backends.choose import build_layers
from engine.batch import BatchResult, ForwardBatch
from engine.config import EngineConfig
from engine.last_tokens import LastTokens
from engine.launch import Launched, LaunchQueue
from engine.loader import LoadedModel
from engine.paged_cache import PagedCache
from engine.states import PackedStates
from kvcache.pool import KVCache, MambaPool


@dataclass(slots=True)
class RunnerCounters:
    """What the runner has done since it started; written by the thread that runs forwards."""

    steps: int = 0
    tokens: int = 0  # new tokens computed
    sampled: int = 0
    model_s: float = 0.0  # preparing, the decoder and lm_head
    sample_s: float = 0.0


class ModelRunner:
    """See engine.batch.Engine. `pools` holds every group of the model's spec, by name."""

    def __init__(self, loaded: LoadedModel, pools: Mapping[str, KVCache], config: EngineConfig) -> None:
        if config.threads:
            torch.set_num_threads(config.threads)
        self.spec = loaded.spec
        self.counters = RunnerCounters()
        self.attention = build_layers(config, loaded, pools)
        self._decoder = getattr(loaded.model, loaded.model.base_model_prefix)
        self._lm_head = loaded.model.lm_head
        self._device = torch.device(config.device)
        states = pools.get("state")
        self._states = PackedStates(states) if isinstance(states, MambaPool) else None
        self._cache = PagedCache(self._states)
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
        with torch.inference_mode(), self._last_tokens.owed(batch):
            logits = self.logits(batch, batch.starts()[1:][batch.sampled] - 1)
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

    def logits(self, batch: ForwardBatch, places: npt.NDArray[np.int64]) -> torch.Tensor:
        """The forward itself: [len(places), vocab] after the new tokens at `places` of the pack.

        No other token goes through lm_head. For the thread that runs forwards, or for a runner that has
        nothing launched.
        """
        input_ids = self._to_device(self._last_tokens.resolve(batch))
        self.attention.prepare(batch)
        if self._states is not None:
            self._states.prepare(batch)
        output = self._decoder(
            input_ids=input_ids[None],
            position_ids=self._to_device(batch.positions)[None],
            past_key_values=self._cache,
            use_cache=False,
            paged=self.attention,
        )
        hidden: torch.Tensor = output.last_hidden_state[0, self._to_device(places)]
        logits: torch.Tensor = self._lm_head(hidden)
        return logits

    def _to_device(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
