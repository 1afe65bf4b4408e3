"""The host's time for a decode step: `python -m bench.host [--json]`.

A whole decode worker (loop, mail, role, scheduler, memory with its tree and events, outbox, ZeroMQ sockets)
over an engine whose device work is free (bench/free_engine.py), in lockstep (overlap depth 0, so nothing
hides anything) but for one. A router in another process starts the rooms, takes their tokens and acknowledges
them. The rooms have a prompt of 512 tokens, which the decode worker computes itself: their steps are then the
same as after a hand-off. `values`, medians over blocks of steps of six workers measured alternately:

    step_ms_64, step_ms_256     wall time of a turn of the loop, greedy; includes what the I/O thread takes
    step_ms_64_logprobs         with the 5 best log-probabilities
    step_ms_64_t1               temperature 1, seeded
    step_ms_1_ahead             one row, greedy, overlap depth 1, where a device takes 0.1 ms for a step
    lock_us_p99                 of our own locks on the loop's thread: from asking for one to giving it back;
                                0 when a step takes none
    locks_per_step              how many a step takes
    kept_bytes_per_token        memory that steps leave behind (tracemalloc), per token: the output, in the
                                request's list and in that of the outbox
    kept_objects_per_step       container objects (tensors are) that a step leaves behind (gc.get_count)

`ratios.ahead_by_thread`: step_ms_1_ahead where a thread issues each step / where the loop does.
"""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from bench.common import alternate, argument_parser, medians, print_result, seconds
from bench.free_engine import Ahead, FreeEngine
from bench.host_router import Rooms, requests, running_router
from bench.timed_lock import own_locks_timed
from common.garbage import freeze_gc
from decode_node.role import DecodeRole
from wire.mailbox import Mail
from wire.messages.rooms import Ack
from wire.request import SamplingParams
from worker.build import build_engine
from worker.loop import Worker
from worker.options import WorkerOptions
from worker.parts import ModelParts

STEPS = 16
ROUNDS = 25
PROMPT = 512
OUTPUTS = STEPS * (ROUNDS + 30)
_KEPT_STEPS = 200
_START_S = 60.0
_ACK_WITHIN_S = 30.0

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=OUTPUTS)
_DEVICE_S = 1e-4  # less than the host takes


class Side(NamedTuple):
    """What one worker does."""

    rows: int
    sampling: SamplingParams = GREEDY
    ahead: Ahead | None = None


SIDES = {
    "step_ms_64": Side(64),
    "step_ms_256": Side(256),
    "step_ms_64_logprobs": Side(
        64, SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=OUTPUTS, top_logprobs=5)
    ),
    "step_ms_64_t1": Side(
        64, SamplingParams(temperature=1.0, seed=7, ignore_eos=True, max_new_tokens=OUTPUTS)
    ),
    "step_ms_1_ahead": Side(1, ahead=Ahead(_DEVICE_S)),
    "step_ms_1_by_thread": Side(1, ahead=Ahead(_DEVICE_S, by_thread=True)),
}


@contextmanager
def decode_worker(side: Side) -> Iterator[Worker]:
    """A decode worker for so many rooms, whose loop the caller turns."""
    context, rows = PROMPT + OUTPUTS, side.rows
    options = WorkerOptions(
        model="bench",
        engine="fake",
        max_running_requests=rows,
        max_context_tokens=context,
        max_total_tokens=rows * (context + 16),
        overlap_depth=int(side.ahead is not None),
    )
    fake, memory = build_engine(options, reserves=True)
    model = ModelParts(FreeEngine(fake.spec, rows, side.ahead), memory)
    worker = Worker(options, DecodeRole, kept=model)
    try:
        yield worker
    finally:
        worker.close()
        fake.close()
        model.close()


def turn(worker: Worker) -> None:
    """One turn of the loop, which does not wait for mail."""
    worker.turn(worker.parts.services.mailbox.take())


def start(worker: Worker, rows: int) -> None:
    """Turn until all rooms decode."""
    until = time.monotonic() + _START_S
    while len(worker.rooms()) < rows or worker.parts.role.scheduler.load().queued_prefill_tokens:
        turn(worker)
        assert time.monotonic() < until, "the rooms do not start"


def kept() -> dict[str, float]:
    """What the steps of a worker leave behind."""
    side = SIDES["step_ms_64"]
    rows = side.rows
    tracemalloc.start()  # first: a list that grows later would count as a whole
    with (
        decode_worker(side) as worker,
        running_router([(worker.record().mailbox, requests(1, rows, PROMPT, side.sampling))]),
    ):
        start(worker, rows)
        for _ in range(STEPS):
            turn(worker)
        gc.collect()
        gc.disable()
        before = _held(worker)
        for _ in range(_KEPT_STEPS):
            turn(worker)
        after = _held(worker)
        gc.enable()
    tracemalloc.stop()
    return {
        "kept_bytes_per_token": round((after[0] - before[0]) / (_KEPT_STEPS + 1) / rows, 1),
        "kept_objects_per_step": round((after[1] - before[1]) / (_KEPT_STEPS + 1), 1),
    }


def _held(worker: Worker) -> tuple[int, int]:
    """Traced bytes and container objects, when the router has acknowledged all output but the last step's."""
    mailbox, req = worker.parts.services.mailbox, worker.rooms()[0].req
    last = (req.room, req.epoch, len(req.output_ids))
    mails: list[Mail] = []
    until = time.monotonic() + _ACK_WITHIN_S
    while not any(isinstance(mail.message, Ack) and last in mail.message.items for mail in mails):
        mails += mailbox.wait(_ACK_WITHIN_S)
        assert time.monotonic() < until, "the router acknowledges nothing"
    worker.turn(mails)
    return tracemalloc.get_traced_memory()[0], gc.get_count()[0]


def main() -> None:
    """Measure and print."""
    options = argument_parser(__doc__).parse_args()
    with ExitStack() as stack:
        held = stack.enter_context(own_locks_timed())
        workers = {name: stack.enter_context(decode_worker(side)) for name, side in SIDES.items()}
        rooms: Rooms = [
            (worker.record().mailbox, requests(1000 * i + 1, SIDES[name].rows, PROMPT, SIDES[name].sampling))
            for i, (name, worker) in enumerate(workers.items())
        ]
        stack.enter_context(running_router(rooms))
        for name, worker in workers.items():
            start(worker, SIDES[name].rows)
        freeze_gc()

        def block(worker: Worker) -> float:
            def steps() -> None:
                for _ in range(STEPS):
                    turn(worker)

            return seconds(steps) / STEPS * 1e3

        sides = {name: (lambda w=worker: block(w)) for name, worker in workers.items()}
        alternate(sides, 2)
        held.clear()
        values = {name: round(value, 3) for name, value in medians(alternate(sides, ROUNDS)).items()}
        by_thread = values.pop("step_ms_1_by_thread")
        ratios = {"ahead_by_thread": round(by_thread / values["step_ms_1_ahead"], 3)}
        values["lock_us_p99"] = (
            round(statistics.quantiles(held, n=100)[98] * 1e6, 1) if len(held) > 1 else 0.0
        )
        values["locks_per_step"] = round(len(held) / (len(sides) * ROUNDS * STEPS), 2)
    print_result("host", ratios, values | kept(), options.json)


if __name__ == "__main__":
    main()
