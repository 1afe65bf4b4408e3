"""What the next token of a sequence depends on besides its logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.bad_words import BadWords
from engine.grammar import GrammarState
from engine.noise import stream_key
from engine.thoughts import ThoughtState
from wire.request import SamplingParams


class SamplingState:
    """One sequence's sampling parameters, and the tokens that its penalties depend on.

    `outputs` is the request's own list: forced tokens, then every result that has been taken. The sampler
    reads it when the sequence joins a batch (no forward with it is in flight then), and counts by itself what
    it samples afterwards.
    """

    __slots__ = (
        "_final",
        "bad_words",
        "banned",
        "ends",
        "grammar",
        "is_masked",
        "is_penalised",
        "outputs",
        "params",
        "prompt_ids",
        "stream",
        "thoughts",
    )  # fmt: skip

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: npt.NDArray[np.int32],
        eos_token_ids: Sequence[int],
        choice: int = 0,
        outputs: list[int] | None = None,
        grammar: GrammarState | None = None,
    ) -> None:
        """`grammar` is at the beginning of the outputs, if `params` have one."""
        self.params = params
        self.prompt_ids = prompt_ids
        self.outputs = [] if outputs is None else outputs
        self.stream = stream_key(params.seed, choice)
        ends = (*(() if params.ignore_eos else eos_token_ids), *params.stop_token_ids)
        self.ends = frozenset(ends)  # the request stops with one of them
        self.grammar = grammar
        self.thoughts = None if params.thoughts is None else ThoughtState(params.thoughts)
        self.bad_words = BadWords(params.bad_words) if params.bad_words else None
        self.is_masked = bool(grammar or self.thoughts or self.bad_words)  # at some position
        # A grammar lets an end-of-sequence token pass only where the output may end, or must.
        self._final = frozenset(eos_token_ids if grammar is not None else ())
        # Before `min_tokens` outputs they are not sampled. A grammar bans them itself.
        self.banned = ends if params.min_tokens and grammar is None else ()
        self.is_penalised = (
            params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )

    @property
    def takes_argmax(self) -> bool:
        """Whether every next token is the argmax of the raw logits."""
        params = self.params
        asked = params.logit_bias or params.allowed_token_ids
        changed = asked or self.is_penalised or self.banned or self.is_masked
        return params.temperature == 0 and not changed

    @property
    def is_ready(self) -> bool:
        """Whether it can be sampled without waiting for its grammar."""
        return self.grammar is None or self.grammar.is_compiled

    def is_masked_at(self, position: int) -> bool:
        """Whether what may be sampled at this output position depends on the tokens before it."""
        if self.grammar is not None or self.bad_words is not None:
            return True
        return self.thoughts is not None and self.thoughts.needs(position)

    def is_last(self, token: int, position: int) -> bool:
        """Whether `token`, the output at `position`, ends the sequence."""
        return token in self._final or (token in self.ends and position >= self.params.min_tokens)
