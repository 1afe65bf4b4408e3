"""What the next token of a sequence depends on besides its logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from wire.request import SamplingParams


class SamplingState:
    """One sequence's sampling parameters, and the tokens that its penalties depend on.

    `outputs` are the output tokens sampled or forced so far; `output_counts` is how often each occurs. After
    the request is queued, only the thread that samples uses this object.
    """

    __slots__ = ("choice", "eos_token_ids", "output_counts", "outputs", "params", "prompt_ids")

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: npt.NDArray[np.int32],
        eos_token_ids: Sequence[int],
        choice: int = 0,
        outputs: Sequence[int] = (),
    ) -> None:
        self.params = params
        self.prompt_ids = prompt_ids
        self.eos_token_ids = tuple(eos_token_ids)
        self.choice = choice
        self.outputs = list(outputs)
        self.output_counts = Counter(self.outputs)

    def rewind(self, position: int) -> None:
        """Forget the outputs from `position` on. They are sampled again and must not be counted twice."""
        assert position <= len(self.outputs), "an output position was skipped"
        for token in self.outputs[position:]:
            self.output_counts[token] -= 1
            if not self.output_counts[token]:
                del self.output_counts[token]
        del self.outputs[position:]

    def record(self, token: int) -> None:
        """Append `token` as the next output."""
        self.outputs.append(token)
        self.output_counts[token] += 1

    @property
    def suppressed(self) -> tuple[int, ...]:
        """Ids that may not be sampled now: those that would stop a request before `min_tokens` outputs."""
        if len(self.outputs) >= self.params.min_tokens:
            return ()
        eos = () if self.params.ignore_eos else self.eos_token_ids
        return (*eos, *self.params.stop_token_ids)

    @property
    def plain_greedy(self) -> bool:
        """Whether the next token is the argmax of the raw logits and no log-probabilities are requested."""
        p = self.params
        return (
            p.temperature == 0
            and p.repetition_penalty == 1
            and p.presence_penalty == 0
            and p.frequency_penalty == 0
            and not p.logit_bias
            and p.top_logprobs is None
            and not self.suppressed
        )
