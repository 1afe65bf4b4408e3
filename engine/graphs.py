"""Decode steps as recorded graphs: the host issues one replay instead of hundreds of kernels.

A graph reads and writes fixed addresses. So there is one per padded batch size, each over input buffers of
its own. A step copies its inputs into the buffers of its size and plans attention, both outside the graph,
and replays the graph. What the graph computes stays in its output buffers until its next replay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from engine.batch import ForwardBatch
from engine.device_copies import pinned
from engine.padding import is_decode, padded, padded_sizes, padding
from engine.paged_layers import PagedLayers
from engine.states import PackedStates

WARM_UPS = 2  # forwards before the recorded one, so that libraries have chosen and loaded their kernels


@dataclass(frozen=True)
class DecodeLimits:
    """The largest decode step of a worker."""

    sequences: int
    context_pages: int  # of one sequence, in the group with the smallest pages
    rows: int  # of req_to_token


class Outputs(NamedTuple):
    """What a decode step computes of S sequences, padding included."""

    hidden: torch.Tensor  # [S, hidden]
    logits: torch.Tensor  # [S, vocab]
    tokens: torch.Tensor  # int64 [S]: the token with the best logit
    logits_are_finite: torch.Tensor  # bool [S]
    hidden_is_finite: torch.Tensor  # bool [S]
    summary: torch.Tensor  # int64 [3, S]: the three above, for one copy to the host


class StepInputs:
    """The inputs of a decode step on the device, at fixed addresses. int64 [S] each."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._all = torch.zeros(4, size, dtype=torch.int64, device=device)
        # The kernel that draws tokens was loaded for output positions at a multiple of 16 bytes (load_draw).
        # With a size of 1 only the first and the third of these are; for others Triton compiles it again.
        self.output_positions, self.input_ids, self.positions, self.rows = self._all

    def fill(self, batch: ForwardBatch) -> None:
        """Copy the batch's inputs, in one copy."""
        host = np.zeros(self._all.shape, dtype=np.int64)
        host[0, : len(batch.sampling.positions)] = batch.sampling.positions
        host[1:] = batch.input_ids, batch.positions, batch.rows
        self._all.copy_(pinned(host, self._all.device), non_blocking=True)


Computed = TypeVar("Computed", bound=tuple[torch.Tensor, ...])
Computed_co = TypeVar("Computed_co", bound=tuple[torch.Tensor, ...], covariant=True)
"""What a step computes: Outputs, or what a rank that does not sample computes."""


class Replayed(NamedTuple, Generic[Computed]):
    """What a replay computes, and what it computes from."""

    outputs: Computed
    inputs: StepInputs


class Recorded(Protocol[Computed_co]):
    """A recorded step."""

    @property
    def outputs(self) -> Computed_co:
        """Where replay() leaves its results."""
        ...

    def replay(self) -> None:
        """Compute `outputs` from what the input buffers now hold."""
        ...


class Recorder(Protocol):
    """Records steps, all on one stream."""

    def record(self, step: Callable[[], Computed]) -> Recorded[Computed]:
        """Run `step` and record what it does."""
        ...


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """The stream on which steps are recorded on a GPU, the same for all recorders of this process: cuBLAS has
    a workspace of up to 32 MiB on each stream that it is used on, and keeps it."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class CudaRecorder:
    """Records CUDA graphs on the current device. They share one memory pool, because only one is replayed at
    a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Callable[[], Computed]) -> Recorded[Computed]:
        side = _side_stream(torch.cuda.current_device())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # "thread_local": NCCL's own thread looks at its events meanwhile, which would end a global capture.
        with torch.cuda.graph(graph, self._pool, side, capture_error_mode="thread_local"):
            outputs = step()
        return _CudaGraph(graph, outputs)


@dataclass(frozen=True)
class _CudaGraph(Generic[Computed]):
    graph: torch.cuda.CUDAGraph
    outputs: Computed

    def replay(self) -> None:
        self.graph.replay()


class _Step(NamedTuple, Generic[Computed]):
    """Everything that one padded size has of its own."""

    inputs: StepInputs
    layers: PagedLayers
    states: PackedStates | None
    recorded: Recorded[Computed]


class DecodeGraphs(Generic[Computed]):
    """A recorded step per padded batch size, recorded when it is first needed or by `record_all`."""

    def __init__(
        self,
        limits: DecodeLimits,
        layers: PagedLayers,
        states: PackedStates | None,
        compute: Callable[[StepInputs, PagedLayers, PackedStates | None], Computed],
        recorder: Recorder,
        device: torch.device,
    ) -> None:
        """`layers` must be recordable. `compute` is recorded, so that it must not look at values."""
        self._sizes = padded_sizes(limits.sequences)
        self._limits = limits
        self._layers = layers
        self._states = states
        self._compute = compute
        self._recorder = recorder
        self._device = device
        self._steps: dict[int, _Step[Computed]] = {}

    def record_all(self) -> None:
        """Record every size, the largest first: the smaller ones then fit into its memory."""
        for size in reversed(self._sizes):
            self._steps[size] = self._record(size)

    def computes(self, batch: ForwardBatch) -> bool:
        """Whether a graph computes the batch."""
        return len(batch.q_lens) <= self._sizes[-1] and is_decode(batch)

    def run(self, batch: ForwardBatch) -> Replayed[Computed]:
        """Compute a batch that a graph computes, padded."""
        n = len(batch.q_lens)
        size = next(size for size in self._sizes if size >= n)
        whole = padded(batch, size)
        step = self._steps.get(size)
        if step is None:
            step = self._steps[size] = self._record(size)
        self._fill(step.inputs, step.layers, step.states, whole)
        step.recorded.replay()
        return Replayed(step.recorded.outputs, step.inputs)

    @staticmethod
    def _fill(
        inputs: StepInputs, layers: PagedLayers, states: PackedStates | None, batch: ForwardBatch
    ) -> None:
        inputs.fill(batch)
        layers.prepare(batch)
        if states is not None:
            states.prepare(batch)

    def _record(self, size: int) -> _Step[Computed]:
        """Record over padding alone: a step that is recorded is computed several times."""
        inputs = StepInputs(size, self._device)
        layers = self._layers.fixed(size, self._limits.context_pages)
        states = None if self._states is None else self._states.fixed(size)
        nothing = padding(size, windows=self._layers.has_window, states=states is not None)
        self._fill(inputs, layers, states, nothing)
        recorded = self._recorder.record(lambda: self._compute(inputs, layers, states))
        return _Step(inputs, layers, states, recorded)
