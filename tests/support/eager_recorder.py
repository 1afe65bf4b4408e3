"""A Recorder without CUDA: a replay computes the step again, from what its input buffers hold then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class EagerRecorder:
    """`steps` are in the order in which they were recorded."""

    steps: list[EagerStep] = field(default_factory=list)

    def record(self, step: Callable[[], Any]) -> EagerStep:
        outputs = step()
        self.steps.append(EagerStep(step, type(outputs)(*(output.clone() for output in outputs))))
        return self.steps[-1]


@dataclass
class EagerStep:
    """Its outputs have one place, and are overwritten by the next replay, as a graph's are."""

    step: Callable[[], Any]
    outputs: Any
    replays: int = 0

    def replay(self) -> None:
        self.replays += 1
        for held, computed in zip(self.outputs, self.step(), strict=True):
            held.copy_(computed)
