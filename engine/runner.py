"""ModelRunner: an Engine over a transformers model.

A decode step goes through a recorded graph where the device has one (engine/graphs.py); any other batch goes
through the model as it is. Both sample the same way. The host waits for the device once a step: when the
result is read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.argmax import Argmax, argmax, finite_rows
from engine.backends.choose import build_layers
from engine.batch import BatchResult, ForwardBatch, PooledPrompt
from engine.completion import Completions, completions_of
from engine.config import EngineConfig
from engine.cpu.threads import few_tokens
from engine.cuda.draw import load_draw
from engine.cuda.experts import experts_wait
from engine.cuda.stored_experts import StoredExperts
from engine.device_copies import FetchedTensor, upload
from engine.grammar import GrammarCompiler
from engine.graphs import CudaRecorder, DecodeGraphs, DecodeLimits, Outputs, Recorder, Replayed, StepInputs
from engine.last_tokens import LastTokens
from engine.launch import Launched, LaunchQueue, Read
from engine.loader import LoadedModel, read_tokenizer
from engine.paged_cache import PagedCache
from engine.paged_layers import PagedLayers
from engine.pooled_prompts import by_sequence, pool_prompts
from engine.sampler import Sampled, Sampler, read_argmax
from engine.scored_prompts import read_scores, score_prompts
from engine.states import PackedStates
from kvcache.pool import KVCache, MambaPool

log = logging.getLogger(__name__)


class StepFindings(NamedTuple):
    """What a recorded step has found in its logits and hidden states."""

    best: Argmax
    hidden_is_finite: torch.Tensor  # bool [T]


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
        self.kept_formats = loaded.kept
        self.attention = build_layers(config, loaded, pools)
        self._decoder = getattr(loaded.model, loaded.model.base_model_prefix)
        self._lm_head = loaded.model.lm_head
        self._device = torch.device(config.device)
        stored = any(isinstance(module, StoredExperts) for module in loaded.model.modules())
        self._experts_wait = not stored and experts_wait(loaded.model.config, loaded.spec.dtype, self._device)
        states = pools.get("state")
        self._states = PackedStates(states) if isinstance(states, MambaPool) else None
        self._last_tokens = LastTokens(self._device)
        completions = completions or completions_of(self._device)
        self._sampler = Sampler(
            loaded.spec.vocab_size, self._device, lambda array: upload(array, self._device), completions
        )
        self._graphs: DecodeGraphs | None = None
        self._queue = LaunchQueue(config.overlap, completions=completions)
        self.grammars = GrammarCompiler(
            lambda: read_tokenizer(config.model), loaded.spec.vocab_size, loaded.spec.eos_token_ids
        )

    def record_decode(self, limits: DecodeLimits, recorder: Recorder | None = None) -> None:
        """From now on run decode steps within `limits` from recorded graphs, if every layer can be recorded.
        By default they are CUDA graphs, all recorded now. Call it before the first launch."""
        with self._current_device():
            load_draw(self.spec.vocab_size, self.spec.dtype, self._device)
        if not self.attention.recordable:
            log.info("decode steps are not recorded: an attention backend reads the batch on the host")
            return
        if self._experts_wait:
            log.warning("decode steps are not recorded: the host waits for the products of experts")
            return
        self._last_tokens = LastTokens(self._device, limits.rows + 1)
        self._graphs = DecodeGraphs(
            limits, self.attention, self._states, self._step, recorder or CudaRecorder(), self._device
        )
        with torch.inference_mode(), self._current_device():
            self._graphs.record_all()

    def launch(self, batch: ForwardBatch) -> Launched:
        return self._queue.launch(lambda: self.issue(batch), is_brief=self._is_brief(batch))

    def close(self) -> None:
        self.grammars.close()
        self._queue.close()

    def _is_brief(self, batch: ForwardBatch) -> bool:
        """Whether the host has little to issue: a replay, and sampling that waits for no earlier token."""
        replays = self._graphs is not None and self._graphs.computes(batch)
        return replays and not any(state.grammar is not None for state in batch.sampling.states)

    def issue(self, batch: ForwardBatch) -> Read:
        """Put the forward on the device. Nothing waits for the device."""
        recording = self._last_tokens.placeholders_on_failure(batch)
        few = few_tokens(len(batch.positions)) if self._device.type == "cpu" else nullcontext()
        with torch.inference_mode(), self._current_device(), few, recording:
            replayed = self._replayed(batch)
            if replayed is None:
                return self._sampled(batch, *self._computed(batch))
            outputs, n = replayed.outputs, len(batch.sampled)
            plain = not (batch.scored or batch.pooled) and self._sampler.takes_argmax(batch.sampling.states)
            if plain:
                self._last_tokens.mark(batch)
                return self._read_argmax(batch, FetchedTensor(outputs.summary, is_reused=True))
            found = StepFindings(
                Argmax(outputs.tokens[:n], outputs.logits_are_finite[:n]), outputs.hidden_is_finite[:n]
            )
            positions = replayed.inputs.output_positions[:n]
            return self._sampled(batch, outputs.hidden[:n], outputs.logits[:n], positions, found)

    def _read_argmax(self, batch: ForwardBatch, summary: FetchedTensor) -> Read:
        """The result of a recorded step of which only the argmax is wanted: the graph has kept the tokens."""

        def read() -> BatchResult:
            tokens, logits, hidden = summary.numpy()[:, : len(batch.sampled)]
            sampled = read_argmax(tokens, logits)
            return BatchResult(sampled.tokens, sampled.logprobs, _failures(sampled, hidden != 0, batch))

        return read

    def _sampled(
        self,
        batch: ForwardBatch,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        positions: torch.Tensor,
        found: StepFindings | None = None,
    ) -> Read:
        """Sample, and fetch what the host wants to know. hidden [T, hidden], logits [N, vocab]; `found` is
        what is known of them already."""
        best, is_finite = (None, finite_rows(hidden)) if found is None else found
        finite = FetchedTensor(is_finite, is_reused=found is not None)
        sample = self._sampler.sample(logits, batch.sampling, positions, best)
        self._last_tokens.record(batch, sample.tokens)
        packed = FetchedTensor(sample.packed)
        scores = score_prompts(batch, hidden, self._lm_head, self._upload) if batch.scored else None
        fetched = None if scores is None else FetchedTensor(scores)
        sums = FetchedTensor(pool_prompts(batch, hidden)) if batch.pooled else None

        def read() -> BatchResult:
            sampled = sample.read(packed.numpy())
            failures = _failures(sampled, finite.numpy(), batch)
            refusals = {int(batch.sampled[i]): problem for i, problem in sampled.refusals.items()}
            scored = {} if fetched is None else read_scores(batch, fetched.numpy(), self.spec.vocab_size)
            pooled = {} if sums is None else by_sequence(batch, sums.numpy())
            return BatchResult(sampled.tokens, sampled.logprobs, failures, refusals, scored, pooled)

        return read

    def _upload(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return upload(array, self._device)

    def _current_device(self) -> AbstractContextManager[object]:
        """Events, graphs and FlashInfer's plans are on the current device, which is a thread's own."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _replayed(self, batch: ForwardBatch) -> Replayed | None:
        """What the graph of the batch's size computes; None if there is none."""
        if self._graphs is None:
            return None
        self._last_tokens.check(batch)
        return self._graphs.run(batch)

    def _computed(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(hidden [T, hidden], logits of the sampled sequences [N, vocab], their output positions [N])"""
        hidden = self._hidden(batch)
        ends = batch.starts()[1:][batch.sampled] - 1
        last = hidden
        if not np.array_equal(ends, np.arange(len(hidden))):  # in a decode step each token is sampled from
            last = hidden[upload(ends, self._device)]
        return hidden, self._lm_head(last), upload(batch.sampling.positions, self._device)

    def _step(self, inputs: StepInputs, layers: PagedLayers, states: PackedStates | None) -> Outputs:
        """A decode step over fixed addresses; recorded. The best token of each row is kept as its last one;
        what the sampler chooses instead replaces it."""
        ids = self._last_tokens.fill(inputs.input_ids, inputs.rows)
        hidden = self._through_layers(ids, inputs.positions, layers, states)
        logits = self._lm_head(hidden)
        best = argmax(logits)
        self._last_tokens.keep(inputs.rows, best.tokens)
        is_finite = finite_rows(hidden)
        return Outputs(hidden, logits, *best, is_finite, torch.stack((*best, is_finite)))

    def logits(self, batch: ForwardBatch, places: npt.NDArray[np.int64]) -> torch.Tensor:
        """Run the model. Returns logits [len(places), vocab] after the new tokens at `places` of the pack.

        No other token goes through lm_head. Call it while nothing is launched.
        """
        with self._current_device():
            every = tuple(PooledPrompt(sequence, 0) for sequence in range(len(batch.q_lens)))
            hidden = self._hidden(replace(batch, pooled=every))
            logits: torch.Tensor = self._lm_head(hidden[upload(places, self._device)])
        return logits

    def _hidden(self, batch: ForwardBatch) -> torch.Tensor:
        """Run the model's layers. Returns what the last one says of each new token, [T, hidden]."""
        input_ids = self._last_tokens.resolve(batch)
        self.attention.prepare(batch)
        if self._states is not None:
            self._states.prepare(batch)
        positions = upload(batch.positions, self._device)
        return self._through_layers(input_ids, positions, self.attention, self._states)

    def _through_layers(
        self, ids: torch.Tensor, positions: torch.Tensor, layers: PagedLayers, states: PackedStates | None
    ) -> torch.Tensor:
        output = self._decoder(
            input_ids=ids[None],
            position_ids=positions[None],
            past_key_values=PagedCache(states),
            use_cache=False,
            paged=layers,
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden


def _failures(
    sampled: Sampled, hidden_is_finite: npt.NDArray[np.bool_], batch: ForwardBatch
) -> dict[int, str]:
    failures = failed_sequences(hidden_is_finite, batch)
    for i, problem in sampled.failures.items():
        failures.setdefault(int(batch.sampled[i]), problem)
    return failures


def failed_sequences(is_finite: npt.NDArray[np.bool_], batch: ForwardBatch) -> dict[int, str]:
    """The sequences of the batch with a new token whose hidden state is not finite, with the reason.

    `is_finite` [T], by token. A chunk that samples nothing has no logits, but its pages are cached. A value
    in its K or V that is not finite makes a hidden state not finite, because the token itself attends to it.
    """
    if is_finite.all():
        return {}
    owners = np.repeat(np.arange(len(batch.q_lens)), batch.q_lens)
    return {int(i): "the model's hidden states are not finite" for i in np.unique(owners[~is_finite])}
