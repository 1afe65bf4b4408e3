"""ModelRunner: an Engine over a transformers model."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from engine.backends.choose import build_layers
from engine.batch import BatchResult, ForwardBatch
from engine.completion import Completions, completions_of
from engine.config import EngineConfig
from engine.last_tokens import LastTokens
from engine.launch import Launched, LaunchQueue, Read
from engine.loader import LoadedModel
from engine.paged_cache import PagedCache
from engine.sampler import Sampler
from engine.states import PackedStates
from kvcache.pool import KVCache, MambaPool


class ModelRunner:
    """An Engine over a transformers model. `pools` holds a pool for each group of the model, by name."""

    def __init__(
        self,
        loaded: LoadedModel,
        pools: Mapping[str, KVCache],
        config: EngineConfig,
        completions: Completions | None = None,
    ) -> None:
        """`completions` are by default those of `config.device`."""
        if config.threads:
            torch.set_num_threads(config.threads)
        self.spec = loaded.spec
        self.attention = build_layers(config, loaded, pools)
        self._decoder = getattr(loaded.model, loaded.model.base_model_prefix)
        self._lm_head = loaded.model.lm_head
        self._device = torch.device(config.device)
        states = pools.get("state")
        self._states = PackedStates(states) if isinstance(states, MambaPool) else None
        self._cache = PagedCache(self._states)
        self._last_tokens = LastTokens()
        self._sampler = Sampler(loaded.spec.vocab_size, self._device)
        self._queue = LaunchQueue(config.overlap, completions=completions or completions_of(self._device))

    def launch(self, batch: ForwardBatch) -> Launched:
        return self._queue.launch(lambda: self._run(batch))

    def close(self) -> None:
        self._queue.close()

    def _run(self, batch: ForwardBatch) -> Read:
        with torch.inference_mode(), self._last_tokens.placeholders_on_failure(batch):
            hidden = self._hidden(batch)
            ends = batch.starts()[1:][batch.sampled] - 1
            logits = self._lm_head(hidden[self._to_device(ends)])
            positions = self._to_device(batch.sampling.positions)
            sampled = self._sampler.sample(logits, batch.sampling, positions).wait()
            failures = failed_sequences(hidden, batch)
        for i, problem in sampled.failures.items():
            failures.setdefault(int(batch.sampled[i]), problem)
        self._last_tokens.record(batch, sampled.tokens)
        result = BatchResult(sampled.tokens, sampled.logprobs, failures)
        return lambda: result

    def logits(self, batch: ForwardBatch, places: npt.NDArray[np.int64]) -> torch.Tensor:
        """Run the model. Returns logits [len(places), vocab] after the new tokens at `places` of the pack.

        No other token goes through lm_head. Call it on the thread that runs forwards, or while nothing is
        launched.
        """
        logits: torch.Tensor = self._lm_head(self._hidden(batch)[self._to_device(places)])
        return logits

    def _hidden(self, batch: ForwardBatch) -> torch.Tensor:
        """Run the model's layers. Returns what the last one says of each new token, [T, hidden]."""
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
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def _to_device(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def failed_sequences(hidden: torch.Tensor, batch: ForwardBatch) -> dict[int, str]:
    """The sequences of the batch of which some hidden state [T, hidden] is not finite, with the reason.

    A chunk that samples nothing has no logits, but its pages are cached. A value in its K or V that is not
    finite makes a hidden state not finite, because the token itself attends to it.
    """
    if math.isfinite(float(hidden.sum(dtype=torch.float32))):
        return {}
    finite = hidden.sum(-1, dtype=torch.float32).isfinite().cpu().numpy()
    owners = np.repeat(np.arange(len(batch.q_lens)), batch.q_lens)
    return {int(i): "the model's hidden states are not finite" for i in np.unique(owners[~finite])}
