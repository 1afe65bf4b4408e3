"""PromptQueue: the prompts that a modelled worker has to compute."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from itertools import count

from simulator.attempt import Attempt

_KEPT = 1 - 1 / 32  # the weight of earlier prompts after each new one, as in the product's workers


class PromptQueue:
    """Prompts by priority, then by arrival. A prompt stays in the queue until all of it is computed."""

    def __init__(self) -> None:
        self._queue: list[tuple[int, int, Attempt]] = []  # by (-priority, number)
        self._numbers = count(1)
        self._waiting_tokens = 0  # of prompts that have not started, whatever is cached of them
        self._prompts_lately = 0.0  # tokens of prompts that were started, fading
        self._computed_lately = 0.0  # the part of them that was not cached, fading

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Attempt]:
        return (attempt for _, _, attempt in self._queue)

    def push(self, attempt: Attempt) -> None:
        """Add a prompt that has not started."""
        insort(self._queue, (-attempt.request.trace.priority, next(self._numbers), attempt))
        self._waiting_tokens += attempt.prompt

    def remove(self, attempt: Attempt) -> None:
        """Remove a prompt, if it is there."""
        for at, (_, _, queued) in enumerate(self._queue):
            if queued is attempt:
                del self._queue[at]
                if not attempt.started:
                    self._waiting_tokens -= attempt.prompt
                return

    def started(self, attempt: Attempt) -> None:
        """A prompt has started: it is known what of it was cached."""
        self._waiting_tokens -= attempt.prompt
        self._prompts_lately = _KEPT * self._prompts_lately + attempt.prompt
        self._computed_lately = _KEPT * self._computed_lately + attempt.left

    def tokens(self) -> int:
        """Estimate the tokens to compute.

        As in the product's workers, waiting prompts are assumed to be cached to the same share as the last
        ones, because they are matched only when their turn comes.
        """
        share = self._computed_lately / self._prompts_lately if self._prompts_lately else 1.0
        waiting = sum(not one.started for one in self)
        started = sum(one.left for one in self if one.started)
        return max(waiting, round(share * self._waiting_tokens)) + started
