"""The cost of a decode step of the scheduler in Python: `python -m bench.scheduler [--json]`.

The engine returns at once, so a step is schedule + launch + take result. `values`, microseconds per step,
medians over blocks of steps, at context 512 and page size 16:

    step_us_b1, step_us_b8, step_us_b64    overlap depth 0
    step_us_b8_overlap                     overlap depth 1
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.common import alternate, argument_parser, medians, print_result, seconds
from engine.batch import BatchResult, ForwardBatch
from engine.fake import fake_spec
from engine.spec import ModelSpec
from kvcache.config import CacheConfig
from kvcache.memory import build_memory
from scheduler.config import SchedulerConfig
from scheduler.node_policy import AfterPrefill
from scheduler.req import Req, RequestLimits
from scheduler.scheduler import Scheduler
from wire.messages.rooms import RejectKind
from wire.request import GenerateRequest, OutputDelta, SamplingParams

CONTEXT = 512
STEPS = 64
ROUNDS = 15


@dataclass(frozen=True, slots=True)
class _Done:
    """A Pending whose result is there."""

    tokens: np.ndarray

    def result(self, timeout_s: float) -> BatchResult:
        del timeout_s
        return BatchResult(self.tokens, [None] * len(self.tokens))


class InstantEngine:
    """An Engine that samples token 7 everywhere."""

    grammars = None

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec

    def launch(self, batch: ForwardBatch) -> _Done:
        """Return the result without a forward."""
        return _Done(np.full(len(batch.sampled), 7, dtype=np.int64))

    def close(self) -> None:
        """Do nothing."""


class DecodeHere:
    """A NodePolicy that decodes every request in this process and reports to nobody."""

    def on_chunk(self, req: Req) -> None:
        """Do nothing: no page is shipped."""

    def on_prefilled(self, req: Req) -> AfterPrefill:
        """Keep the request."""
        del req
        return AfterPrefill.DECODE

    def on_tokens(self, req: Req, start: int, delta: OutputDelta) -> None:
        """Do nothing."""

    def on_failed(self, req: Req, why: RejectKind, message: str) -> None:
        """Raise: no request of a bench may fail."""
        raise AssertionError(f"{req}: {why}: {message}")


def decoding(batch: int, depth: int) -> Scheduler:
    """A scheduler with `batch` requests in their decode phase, for longer than the bench runs."""
    outputs = STEPS * (ROUNDS + 2) + 4 * batch
    context = CONTEXT + outputs + 16
    spec = fake_spec(max_position=context)
    memory = build_memory(
        CacheConfig(total_tokens=batch * (context + 16), max_context_len=context, max_running_requests=batch),
        spec.groups,
    )
    config = SchedulerConfig(model="m", max_running_requests=batch, overlap_depth=depth)
    scheduler = Scheduler(memory, InstantEngine(spec), DecodeHere(), config)
    limits = RequestLimits(context, spec.vocab_size, ())
    for room in range(batch):
        prompt = (np.arange(CONTEXT) + room).astype("<i4").tobytes()
        sampling = SamplingParams(max_new_tokens=outputs)
        request = GenerateRequest(request_id=str(room), room=room, epoch=1, prompt=prompt, sampling=sampling)
        scheduler.add(Req.from_request(request, "m", limits))
    while scheduler.load().queued_prefill_tokens:
        scheduler.step()
    return scheduler


def main() -> None:
    """Measure and print."""
    parser = argument_parser(__doc__)
    options = parser.parse_args()
    schedulers = {
        "step_us_b1": decoding(1, 0),
        "step_us_b8": decoding(8, 0),
        "step_us_b64": decoding(64, 0),
        "step_us_b8_overlap": decoding(8, 1),
    }

    def block(scheduler: Scheduler) -> float:
        def steps() -> None:
            for _ in range(STEPS):
                scheduler.step()

        return seconds(steps) / STEPS * 1e6

    sides = {name: (lambda s=scheduler: block(s)) for name, scheduler in schedulers.items()}
    values = {name: round(value, 1) for name, value in medians(alternate(sides, ROUNDS)).items()}
    print_result("scheduler", {}, values, options.json)


if __name__ == "__main__":
    main()
