"""WorkerSample: what one worker reports for scaling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """Totals count since the worker's role began."""

    prompts: float = 0.0  # total: prompts whose prefill began
    prefilled_tokens: float = 0.0  # total
    decoded_tokens: float = 0.0  # total
    queued_tokens: float = 0.0  # prompt tokens to compute
    prefill_tokens_per_s: float = 0.0  # while it prefills; 0: not known yet
    rows: float = 0.0  # requests that run
    waiting: float = 0.0  # requests that wait for their turn, memory or a row, here or in routers
    share: float = 0.0  # of its rows or memory in use or promised, the larger
    step_s: float = 0.0  # of a decode step; 0: nothing decodes
    prefills: float = 0.0  # 1: its role is prefill


Samples = Mapping[str, WorkerSample]
"""The samples of a fleet's workers, by worker."""


class Totals:
    """The growth of one total, over all workers, from one call to the next."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}

    def growth(self, totals: Mapping[str, float]) -> float:
        """By how much they grew since the last call. A worker is counted from its second call on.

        A total that is less than before has begun again, with a process or a role, and counts as no growth:
        a mean over a window, as Serve reports it, falls in several steps, and none of them is work.
        """
        grown = 0.0
        for worker, total in totals.items():
            grown += max(0.0, total - self._seen.get(worker, total))
        self._seen.update(totals)
        for worker in self._seen.keys() - totals.keys():
            del self._seen[worker]
        return grown
