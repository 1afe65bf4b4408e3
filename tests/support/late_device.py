"""A device that, like CUDA, only queues what a forward puts on it. It runs when somebody waits for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.batch import BatchResult, Engine, ForwardBatch
from engine.completion import Completion
from engine.launch import Launched, LaunchQueue, Read


@dataclass
class LateDevice:
    """Completions of jobs that run in order, no earlier than somebody waits for one, and take `job_s` each on
    a virtual clock. `is_stuck`: it runs nothing any more."""

    job_s: float = 1.0
    now: float = 0.0
    is_stuck: bool = False
    put: int = 0
    done: int = 0
    _jobs: list[Callable[[], None]] = field(default_factory=list)

    def clock(self) -> float:
        """Seconds."""
        return self.now

    def queue(self, job: Callable[[], None]) -> None:
        """Run `job` later."""
        self.put += 1
        self._jobs.append(job)

    def record(self) -> Completion:
        return _Point(self, self.put)

    def run_to(self, count: int) -> None:
        """Run jobs until `count` of them are done."""
        if self.is_stuck and self.done < count:
            raise TimeoutError
        while self.done < count:
            self._jobs.pop(0)()
            self.now += self.job_s
            self.done += 1


@dataclass
class _Point:
    device: LateDevice
    count: int

    def wait(self, timeout_s: float) -> None:
        del timeout_s
        self.device.run_to(self.count)


class LateEngine:
    """Puts the forwards of an engine on a LateDevice. A forward that samples nothing needs nothing from the
    device, so only the completion shows that its pages are written."""

    def __init__(self, inner: Engine, device: LateDevice, overlap: bool = False) -> None:
        self.inner = inner
        self.spec = inner.spec
        self.device = device
        self.unfinished: list[ForwardBatch] = []
        self._queue = LaunchQueue(overlap, "late-engine", device)

    def launch(self, batch: ForwardBatch) -> Launched:
        return self._queue.launch(lambda: self._issue(batch))

    def close(self) -> None:
        self._queue.close()
        self.device.run_to(self.device.put)
        self.inner.close()

    def _issue(self, batch: ForwardBatch) -> Read:
        self.unfinished.append(batch)
        results: list[Callable[[], BatchResult]] = []

        def job() -> None:
            pending = self.inner.launch(batch)
            results.append(lambda: pending.result(60))
            self.unfinished.remove(batch)

        self.device.queue(job)
        return lambda: results[0]()
