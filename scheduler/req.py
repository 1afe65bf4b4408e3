"""Req: one room's request on this worker, from the first message to the last token."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from common.errors import ContextTooLong, InvalidRequest, WireError
from engine.grammar import GrammarCompiler, GrammarState
from engine.sampling_state import SamplingState
from kvcache.radix_key import Namespace
from kvcache.request import StateHold
from scheduler.deferred import PageReader
from scheduler.prompt_sources import PromptSources
from wire.codec import unpack_tokens
from wire.grammars import LONGEST_GRAMMAR
from wire.messages.caches import CacheSource
from wire.request import GenerateRequest, Pooling, TokenLogprobs
from wire.sampling_ranges import check_sampling
from wire.stages import RequestStage, Stamp, now_ns, stamp

_arrivals = itertools.count()

EMPTY_SLOTS: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)


class ReqState(StrEnum):
    """Where the request is. Only the scheduler package changes it."""

    NEW = "new"  # no one yet
    FETCHING = "fetching"  # waits for pages of its prompt from another worker; holds no memory itself
    WAITING = "waiting"  # in the queue; holds no memory
    PREFILL = "prefill"  # admitted: row, slots of the whole prefill, locked prefix
    RUNNING = "running"  # in the decode batch
    RESERVED = "reserved"  # decode: pages wait for a transfer; only cancel_reservation may end it
    TRANSFERRED = "transferred"  # KV has come; waits for a place in the decode batch
    PAUSED = "paused"  # was decoding: out of the batch with all that it holds, until resume or release
    HANDED_OFF = "handed_off"  # prefill: the policy holds it until release or park
    PARKED = "parked"  # prefill: no memory, and unknown to the scheduler; readmit brings its KV back
    DONE = "done"  # finished, failed or aborted; its memory goes once no launched forward touches it


_STAGES = {
    ReqState.NEW: RequestStage.DECODE_BOOTSTRAP,
    ReqState.FETCHING: RequestStage.PEER_FETCH,
    ReqState.WAITING: RequestStage.PREFILL_WAITING,
    ReqState.PREFILL: RequestStage.PREFILL_FORWARD,
    ReqState.RUNNING: RequestStage.DECODE_LOOP,
    ReqState.RESERVED: RequestStage.DECODE_WAITING,
    ReqState.TRANSFERRED: RequestStage.DECODE_TRANSFERRED,
    ReqState.PAUSED: RequestStage.DECODE_LOOP,
    ReqState.HANDED_OFF: RequestStage.PREFILL_TRANSFER_KV_CACHE,
    ReqState.PARKED: RequestStage.PREFILL_BOOTSTRAP,
}


@dataclass(frozen=True)
class RequestLimits:
    """What a worker's model and memory can take."""

    max_context_tokens: int  # prompt + output
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    grammars: GrammarCompiler | None = None  # None: outputs with a grammar cannot be computed


class ReservedPages(NamedTuple):
    """Pages of one group that a transfer must fill: those of logical pages `first_page` and on, in order.

    For a state group it is one slot, and `first_page` is 0.
    """

    first_page: int
    pages: npt.NDArray[np.int64]

    def within(self, first: int, end: int) -> npt.NDArray[np.int64]:
        """Those of the logical pages `first` up to `end`."""
        return self.pages[max(first - self.first_page, 0) : max(end - self.first_page, 0)]


class Req:
    """A request with its place in memory. Implements kvcache's CachedRequest.

    Lengths count tokens of the context (prompt, then outputs):

        0 .. cache_protected_len .. kv_committed_len .. scheduled_len .. kv_allocated_len
             in the tree, locked    KV is valid         launched forwards cover it   has slots

    `output_ids` starts with the request's forced tokens: they are prefilled like the prompt and never emitted
    again. A request that is prefilled again (retracted, readmitted) prefills its outputs too.
    """

    __slots__ = (
        "_filled", "_tokens", "cache_protected_len", "cached_from", "cached_tokens", "closing", "emitted_len",
        "hidden_sum", "in_flight", "is_kv_only", "kv_allocated_len", "kv_committed_len", "last_node",
        "limit_len", "marks", "namespace", "origin_input_ids", "output_ids", "prefill_len", "prefix_indices",
        "prompt_logprobs", "rank", "reader", "req_pool_idx", "request", "reserved", "resumed",
        "retractions", "running_index", "sampling", "scheduled_len", "sources", "stages_seen", "stamps",
        "state", "state_hold", "tenant_key",
    )  # fmt: skip

    def __init__(
        self,
        request: GenerateRequest,
        namespace: Namespace,
        prompt: npt.NDArray[np.int32],
        eos_token_ids: tuple[int, ...] = (),
        grammar: GrammarState | None = None,
    ) -> None:
        """`prompt` is `request.prompt` decoded, `namespace` what decides which cached KV it may share.
        `grammar` is at its beginning."""
        self.request = request
        self.namespace = namespace
        self.marks = request.marks  # which of its pages are public, and which stay private
        self.tenant_key = request.tenant_key  # what the tenant's cached pages are known by
        # Its order in queues: the greater priority first, then the earlier arrival at any router. A router
        # whose clock is ahead says a time to come, and all who come until then would go before its rooms.
        self.rank = (-request.priority, min(request.arrived_ns, now_ns()), next(_arrivals))
        self.state = ReqState.NEW
        self.resumed = False  # has held memory before: it is admitted before requests that have not
        self.retractions = 0  # how often its pages were taken away while it ran
        self.closing: bool | None = None  # set: memory is released when in_flight is 0, into the tree if True

        self.origin_input_ids = prompt
        self.output_ids: list[int] = list(request.forced)
        self.emitted_len = len(self.output_ids)  # outputs that on_tokens has reported, or that were forced
        self.sampling = SamplingState(
            request.sampling, prompt, eos_token_ids, request.choice, self.output_ids, grammar
        )
        self.limit_len = len(prompt) + request.sampling.max_new_tokens  # longest context; a worker lowers it
        self._tokens: npt.NDArray[np.int32] = np.empty(len(prompt) + 64, dtype=np.int32)  # see fill_ids
        self._tokens[: len(prompt)] = prompt
        self._filled = len(prompt)

        self.prompt_logprobs: list[TokenLogprobs] = []  # of the tokens after the first
        self.hidden_sum: npt.NDArray[np.float64] | None = None  # [hidden] of the prompt's vector
        self.forget_memory()
        self.prefill_len = 0
        self.is_kv_only = False
        self.cached_tokens = 0  # prefix found in the tree when first admitted here
        self.sources = PromptSources()
        self.cached_from: dict[CacheSource, int] = {}  # that prefix, by where its KV came from
        self.in_flight = 0  # launched forwards whose results have not been taken
        self.running_index = -1  # its index in the decode batch, -1 outside
        self.stamps: list[Stamp] = []
        self.stages_seen: set[RequestStage] = set()

    @classmethod
    def from_request(cls, request: GenerateRequest, model: str, limits: RequestLimits) -> Req:
        """A Req for a request that came in a message, which is checked here.

        Raises WireError, InvalidRequest or ContextTooLong.
        """
        if not request.prompt:
            raise WireError("the prompt is empty")
        prompt = unpack_tokens(request.prompt).astype(np.int32)
        known = len(prompt) + len(request.forced)
        if known >= limits.max_context_tokens:
            raise ContextTooLong(known + 1, limits.max_context_tokens, "messages")
        sampling, limit = request.sampling, request.sampling.thoughts
        check_sampling(sampling)
        # All of these ids index arrays of the whole batch: one bad id would fail every request in it.
        for name, given in (
            ("prompt", prompt),
            ("forced", request.forced),
            ("logit_bias", list(sampling.logit_bias)),
            ("stop_token_ids", sampling.stop_token_ids),
            ("allowed_token_ids", sampling.allowed_token_ids),
            ("bad_words", [token for word in sampling.bad_words for token in word]),
            ("thoughts", () if limit is None else (*limit.closing, *limit.opening)),
        ):
            ids = np.asarray(given)
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < limits.vocab_size:
                raise InvalidRequest(f"{name} has token ids outside [0, {limits.vocab_size})", name)
        namespace = Namespace(model, request.extra_key, request.cache_salt)
        grammar = None
        if sampling.grammar is not None:
            if limits.grammars is None:
                raise InvalidRequest("this worker's engine takes no grammars", "grammar")
            if len(sampling.grammar.text) > LONGEST_GRAMMAR:
                raise InvalidRequest(f"the grammar has more than {LONGEST_GRAMMAR} characters", "grammar")
            grammar = limits.grammars.begin(sampling)
        req = cls(request, namespace, prompt, limits.eos_token_ids, grammar)
        req.limit_len = min(req.limit_len, limits.max_context_tokens)
        return req

    def forget_memory(self) -> None:
        """The request holds no row, slot or lock any more (or none yet)."""
        self.req_pool_idx: int | None = None
        self.prefix_indices: npt.NDArray[np.int64] = EMPTY_SLOTS
        self.cache_protected_len = 0
        self.kv_committed_len = 0
        self.kv_allocated_len = 0
        self.scheduled_len = 0
        self.last_node: Any = None  # the tree's node that this request locks
        self.state_hold: StateHold | None = None  # its slots, where the model has a state group
        self.reserved: dict[str, ReservedPages] = {}  # decode: by group, what a transfer must bring
        self.reader: PageReader | None = None  # sends its pages, once the first were given to it

    # -- what was asked ----------------------------------------------------------------------------

    @property
    def room(self) -> int:
        return self.request.room

    @property
    def epoch(self) -> int:
        return self.request.epoch

    @property
    def tenant(self) -> str:
        """On whose behalf the request runs."""
        return self.request.tenant

    @property
    def priority(self) -> int:
        """The greater runs first."""
        return self.request.priority

    # -- tokens ------------------------------------------------------------------------------------

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt alone."""
        return len(self.origin_input_ids)

    @property
    def input_len(self) -> int:
        """Tokens of the prompt and the forced outputs: those of which a hand-off transfers the KV."""
        return len(self.origin_input_ids) + len(self.request.forced)

    @property
    def fill_ids(self) -> npt.NDArray[np.int32]:
        """int32 [prompt + outputs so far], a view of an array that a later call may replace."""
        total = self.prompt_len + len(self.output_ids)
        if total != self._filled:
            self._append(total)
        return self._tokens[:total]

    def _append(self, total: int) -> None:
        if total > len(self._tokens):
            grown = np.empty(max(total, 2 * len(self._tokens)), dtype=np.int32)
            grown[: self._filled] = self._tokens[: self._filled]
            self._tokens = grown
        first = self._filled - self.prompt_len
        self._tokens[self._filled : total] = self.output_ids[first:]
        self._filled = total

    def aim_prefill(self, kv_only: bool = False) -> None:
        """Prefill everything known so far and sample the next position.

        `kv_only` (a readmitted request whose first output is known): only bring back the KV that it had when
        it was handed off, and sample nothing.
        """
        self.is_kv_only = kv_only
        self.prompt_logprobs = []
        self.hidden_sum = None
        self.prefill_len = self.prompt_len + len(self.output_ids) - (1 if kv_only else 0)

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are wanted, and have not left with the first token."""
        return self.request.sampling.prompt_logprobs is not None and not self.output_ids

    @property
    def pooling(self) -> Pooling | None:
        """How the prompt becomes a vector, if one is wanted and has not left with the first token."""
        return None if self.output_ids else self.request.sampling.pooling

    @property
    def needs_all(self) -> bool:
        """Whether all of the prompt is computed, cached or not."""
        return self.scores_prompt or self.pooling is Pooling.MEAN

    def add_hidden(self, part: npt.NDArray[np.float32]) -> None:
        """A chunk's part of the prompt's vector."""
        before = 0.0 if self.hidden_sum is None else self.hidden_sum
        self.hidden_sum = before + part.astype(np.float64)

    def pooled(self) -> bytes | None:
        """The prompt's vector, once it is complete. It is told once."""
        if self.hidden_sum is None:
            return None
        tokens = self.prompt_len if self.request.sampling.pooling is Pooling.MEAN else 1
        vector, self.hidden_sum = self.hidden_sum / tokens, None
        return vector.astype("<f4").tobytes()

    # -- stages ------------------------------------------------------------------------------------

    @property
    def stage(self) -> RequestStage:
        """Where the request is now. Stamps say when it first was there."""
        return _STAGES[self.state]

    def stamp(self, stage: RequestStage) -> None:
        """Enter a stage; a repeat (after retraction, say) is not a new entry, except a prefill chunk."""
        if stage in self.stages_seen and stage is not RequestStage.PREFILL_CHUNKED_FORWARD:
            return
        self.stages_seen.add(stage)
        self.stamps.append(stamp(stage))

    def __repr__(self) -> str:
        return f"Req(room={self.room}.{self.epoch}, {self.state}, {self.prompt_len}+{len(self.output_ids)})"
