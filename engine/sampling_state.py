"""What the next token of a sequence depends on besides its logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.noise import stream_key
from wire.request import SamplingParams


class SamplingState:
    """One sequence's sampling parameters, and the tokens that its penalties depend on.

    `outputs` is the request's own list: forced tokens, then every result that has been taken. The sampler
    reads it when the sequence joins a batch (no forward with it is in flight then), and counts by itself what
    it samples afterwards.
    """

    __slots__ = ("banned", "ends", "is_penalised", "outputs", "params", "prompt_ids", "stream")

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: npt.NDArray[np.int32],
        eos_token_ids: Sequence[int],
        choice: int = 0,
        outputs: list[int] | None = None,
    ) -> None:
        self.params = params
        self.prompt_ids = prompt_ids
        self.outputs = [] if outputs is None else outputs
        self.stream = stream_key(params.seed, choice)
        ends = (*(() if params.ignore_eos else eos_token_ids), *params.stop_token_ids)
        self.ends = frozenset(ends)  # the request stops with one of them
        self.banned = ends if params.min_tokens else ()  # before `min_tokens` outputs they are not sampled
        self.is_penalised = (
            params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )

    @property
    def takes_argmax(self) -> bool:
        """Whether every next token is the argmax of the raw logits."""
        params = self.params
        return params.temperature == 0 and not (self.is_penalised or params.logit_bias or self.banned)
