"""A Recorder without CUDA: a replay computes the step again, from what its input buffers hold then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.graphs import Outputs


@dataclass
class EagerRecorder:
    """`steps` are in the order in which they were recorded."""

    steps: list[EagerStep] = field(default_factory=list)

    def record(self, step: Callable[[], Outputs]) -> EagerStep:
        self.steps.append(EagerStep(step, Outputs(*(output.clone() for output in step()))))
        return self.steps[-1]


@dataclass
class EagerStep:
    """Its outputs have one place, and are overwritten by the next replay, as a graph's are."""

    step: Callable[[], Outputs]
    outputs: Outputs
    replays: int = 0

    def replay(self) -> None:
        self.replays += 1
        for held, computed in zip(self.outputs, self.step(), strict=True):
            held.copy_(computed)
