"""ModelRunner: an Engine over a transformers model.

A decode step goes through a recorded graph where the device has one (engine/graphs.py); any other batch goes
through the model as it is. Both sample the same way. The host waits for the device once a step: when the
result is read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.argmax import Argmax, argmax, finite_rows
from engine.batch import BatchResult, ForwardBatch, PooledPrompt
from engine.completion import Completions, completions_of
from engine.config import EngineConfig
from engine.cuda.draw import load_draw
from engine.cuda.experts import experts_wait
from engine.cuda.stored_experts import StoredExperts
from engine.device_copies import FetchedTensor, upload
from engine.errors import DeviceLost
from engine.forward import ModelForward
from engine.grammar import GrammarCompiler
from engine.graphs import CudaRecorder, DecodeGraphs, DecodeLimits, Outputs, Recorder, Replayed, StepInputs
from engine.last_tokens import LastTokens
from engine.launch import Launched, LaunchQueue, Read
from engine.loader import LoadedModel, read_tokenizer
from engine.paged_layers import PagedLayers
from engine.pooled_prompts import by_sequence, pool_prompts
from engine.ranks.ranks import Ranks
from engine.sampler import Sampled, Sampler, read_argmax
from engine.scored_prompts import read_scores, score_prompts, scored_tokens
from engine.states import PackedStates
from kvcache.pool import KVCache

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
        ranks: Ranks | None = None,
    ) -> None:
        """`completions` are by default those of `config.device`. `ranks`: the others, if the model is one
        rank's part and the pools have its heads; `close` ends them."""
        self.spec = loaded.spec
        self.kept_formats = loaded.kept
        self._ranks = ranks
        self.forward = ModelForward(loaded, pools, config)
        self._lm_head = loaded.model.lm_head
        self._device = torch.device(config.device)
        stored = any(isinstance(module, StoredExperts) for module in loaded.model.modules())
        self._experts_wait = not stored and experts_wait(loaded.model.config, loaded.spec.dtype, self._device)
        self._last_tokens = LastTokens(self._device)
        completions = completions or completions_of(self._device)
        self._sampler = Sampler(
            loaded.spec.vocab_size, self._device, lambda array: upload(array, self._device), completions
        )
        self._graphs: DecodeGraphs[Outputs] | None = None
        self._queue = LaunchQueue(config.overlap, completions=completions)
        self.grammars = GrammarCompiler(
            lambda: read_tokenizer(config.model), loaded.spec.vocab_size, loaded.spec.eos_token_ids
        )

    def record_decode(self, limits: DecodeLimits, recorder: Recorder | None = None) -> None:
        """From now on run decode steps within `limits` from recorded graphs, if every layer can be recorded.
        By default they are CUDA graphs, all recorded now. Call it before the first launch."""
        with self.forward.current_device():
            load_draw(self.spec.vocab_size, self.spec.dtype, self._device)
        if not self.attention.recordable:
            log.info("decode steps are not recorded: an attention backend reads the batch on the host")
            return
        if self._experts_wait:
            log.warning("decode steps are not recorded: the host waits for the products of experts")
            return
        self._last_tokens = LastTokens(self._device, limits.rows + 1)
        self._graphs = DecodeGraphs(
            limits, self.attention, self.forward.states, self._step, recorder or CudaRecorder(), self._device
        )
        if self._ranks is not None:
            self._ranks.record_decode(limits)
        with torch.inference_mode(), self.forward.current_device():
            self._graphs.record_all()
        if self._ranks is not None:
            self._ranks.await_recorded()

    @property
    def attention(self) -> PagedLayers:
        """The backends of the model's layers."""
        return self.forward.attention

    @property
    def rank_count(self) -> int:
        """Ranks that compute the model, this one included."""
        return 1 if self._ranks is None else self._ranks.group.size

    def launch(self, batch: ForwardBatch) -> Launched:
        return self._queue.launch(lambda: self.issue(batch), is_brief=self._is_brief(batch))

    def check(self) -> None:
        if self._ranks is not None:
            self._ranks.check()

    def close(self) -> None:
        self.grammars.close()
        self._queue.close()
        if self._ranks is not None:
            self._ranks.close()

    def _is_brief(self, batch: ForwardBatch) -> bool:
        """Whether the host has little to issue: a replay, and sampling that waits for no earlier token."""
        replays = self._graphs is not None and self._graphs.computes(batch)
        states, positions = batch.sampling.states, batch.sampling.positions
        masked = (i for i, state in enumerate(states) if state.is_masked)
        return replays and not any(states[i].is_masked_at(int(positions[i])) for i in masked)

    def issue(self, batch: ForwardBatch) -> Read:
        """Put the forward on the device. Nothing waits for the device."""
        recording = self._last_tokens.placeholders_on_failure(batch)
        forward = self.forward
        with torch.inference_mode(), forward.current_device(), forward.threads_for(batch), recording:
            if self._graphs is None or not self._graphs.computes(batch):
                return self._sampled(batch, *self._computed(batch))
            replayed, scores = self._replayed(batch, self._graphs)
            outputs, n = replayed.outputs, len(batch.sampled)
            plain = not (batch.scored or batch.pooled) and self._sampler.takes_argmax(batch.sampling.states)
            if plain:
                self._last_tokens.mark(batch)
                return self._read_argmax(batch, FetchedTensor(outputs.summary, is_reused=True))
            found = StepFindings(
                Argmax(outputs.tokens[:n], outputs.logits_are_finite[:n]), outputs.hidden_is_finite[:n]
            )
            positions = replayed.inputs.output_positions[:n]
            return self._sampled(batch, outputs.hidden[:n], outputs.logits[:n], positions, scores, found)

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
        scores: torch.Tensor | None,
        found: StepFindings | None = None,
    ) -> Read:
        """Sample, and fetch what the host wants to know. hidden [T, hidden], logits [N, vocab], scores as of
        score_prompts; `found` is what is known of them already."""
        best, is_finite = (None, finite_rows(hidden)) if found is None else found
        finite = FetchedTensor(is_finite, is_reused=found is not None)
        sample = self._sampler.sample(logits, batch.sampling, positions, best)
        self._last_tokens.record(batch, sample.tokens)
        packed = FetchedTensor(sample.packed)
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

    @contextmanager
    def _all_ranks_or_none(self, batch: ForwardBatch, *heads: npt.NDArray[np.int64]) -> Iterator[None]:
        """Around this rank's part of a forward, of the head's calls for these tokens of the pack, and of
        prompts' scores, which the others are told to compute. One that fails on one of several ranks leaves
        the others waiting for it: nothing can be computed any more."""
        if self._ranks is None:
            yield
            return
        self._ranks.compute(batch, [*heads, *scored_tokens(batch)])
        try:
            yield
        except Exception as error:
            raise DeviceLost(f"the ranks are out of step: {type(error).__name__}: {error}") from error

    def _replayed(
        self, batch: ForwardBatch, graphs: DecodeGraphs[Outputs]
    ) -> tuple[Replayed[Outputs], torch.Tensor | None]:
        """What the graph of the batch's size computes, and the scores of prompts."""
        self._last_tokens.check(batch)
        with self._all_ranks_or_none(batch):
            replayed = graphs.run(batch)
            return replayed, self._scores(batch, replayed.outputs.hidden)

    def _computed(
        self, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(hidden [T, hidden], logits of the sampled sequences [N, vocab], their output positions [N], scores
        of prompts)"""
        ids = self._last_tokens.resolve(batch)
        ends = batch.sampled_places()
        with self._all_ranks_or_none(batch, ends):
            last = hidden = self._hidden(batch, ids)
            if not np.array_equal(ends, np.arange(len(hidden))):  # a decode step samples from each token
                last = hidden[upload(ends, self._device)]
            logits, scores = self._lm_head(last), self._scores(batch, hidden)
        return hidden, logits, upload(batch.sampling.positions, self._device), scores

    def _scores(self, batch: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor | None:
        return score_prompts(batch, hidden, self._lm_head, self._upload) if batch.scored else None

    def _step(self, inputs: StepInputs, layers: PagedLayers, states: PackedStates | None) -> Outputs:
        """A decode step over fixed addresses; recorded. The best token of each row is kept as its last one;
        what the sampler chooses instead replaces it."""
        ids = self._last_tokens.fill(inputs.input_ids, inputs.rows)
        if self._ranks is not None:
            self._ranks.group.share(ids)
        hidden = self.forward.of_inputs(ids, inputs.positions, layers, states)
        logits = self._lm_head(hidden)
        best = argmax(logits)
        self._last_tokens.keep(inputs.rows, best.tokens)
        is_finite = finite_rows(hidden)
        return Outputs(hidden, logits, *best, is_finite, torch.stack((*best, is_finite)))

    def logits(self, batch: ForwardBatch, places: npt.NDArray[np.int64]) -> torch.Tensor:
        """Run the model. Returns logits [len(places), vocab] after the new tokens at `places` of the pack.

        No other token goes through lm_head. Call it while nothing is launched.
        """
        with self.forward.current_device():
            every = tuple(PooledPrompt(sequence, 0) for sequence in range(len(batch.q_lens)))
            whole = replace(batch, pooled=every, scored=())
            ids = self._last_tokens.resolve(batch)
            with self._all_ranks_or_none(whole, places):
                hidden = self._hidden(whole, ids)
                logits: torch.Tensor = self._lm_head(hidden[upload(places, self._device)])
        return logits

    def _hidden(self, batch: ForwardBatch, input_ids: torch.Tensor) -> torch.Tensor:
        """What the last layer says of each new token, [T, hidden]."""
        if self._ranks is not None:
            self._ranks.group.share(input_ids)
        return self.forward.of_batch(batch, input_ids)


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
