from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest

from engine.batch import BatchResult
from engine.errors import DeviceLost, EngineError
from engine.launch import LaunchQueue, Read


def test_a_result_that_does_not_come_in_time_is_an_engine_error() -> None:
    may_end = threading.Event()

    def forward() -> Read:
        assert may_end.wait(60)
        return lambda: BatchResult(np.array([7]), [None])

    queue = LaunchQueue(overlap=True)
    launched = queue.launch(forward)
    with pytest.raises(DeviceLost, match="no result"):
        launched.result(0.0)
    may_end.set()
    assert launched.result(60).tokens.tolist() == [7]
    queue.close()


class Gate:
    """Completions that are reached when the test says so."""

    def __init__(self) -> None:
        self.recorded = 0
        self.reached = threading.Event()
        self.error: Exception | None = None

    def record(self) -> Gate:
        self.recorded += 1
        return self

    def wait(self, timeout_s: float) -> None:
        if not self.reached.wait(timeout_s):
            raise TimeoutError
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("overlap", [False, True])
def test_a_result_waits_for_the_device(overlap: bool) -> None:
    gate = Gate()
    queue = LaunchQueue(overlap, completions=gate)
    launched = queue.launch(lambda: lambda: BatchResult(np.array([7]), [None]))
    with pytest.raises(DeviceLost, match="no result"):
        launched.result(0.01)
    gate.reached.set()
    assert launched.result(60).tokens.tolist() == [7]
    queue.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_so_does_the_error_of_a_forward_that_failed_half_way(overlap: bool) -> None:
    def forward() -> Read:
        raise IndexError("half-way")

    gate = Gate()
    queue = LaunchQueue(overlap, completions=gate)
    launched = queue.launch(forward)
    with pytest.raises(DeviceLost, match="no result"):
        launched.result(0.01)
    gate.reached.set()
    with pytest.raises(EngineError, match="half-way") as failed:
        launched.result(60)
    assert not isinstance(failed.value, DeviceLost)
    queue.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_what_a_forward_that_failed_had_allocated_is_free_for_the_next_one(overlap: bool) -> None:
    """At once, and without a collection: those are rare in a worker (common/garbage.py)."""

    class Activations:
        pass

    allocated: list[weakref.ref[Activations]] = []

    def layer() -> None:
        activations = Activations()
        allocated.append(weakref.ref(activations))
        raise MemoryError("CUDA out of memory")

    def forward() -> Read:
        activations = Activations()
        allocated.append(weakref.ref(activations))
        try:
            layer()
        except MemoryError as error:
            raise RuntimeError("half-way") from error
        raise AssertionError

    def look() -> Read:
        free.append([one() is None for one in allocated])
        return lambda: BatchResult(np.array([7]), [None])

    free: list[list[bool]] = []
    queue = LaunchQueue(overlap)
    gc.disable()
    try:
        failed = queue.launch(forward)
        queue.launch(look).result(60)
        with pytest.raises(EngineError, match="RuntimeError: half-way") as raised:
            failed.result(60)
        exception = weakref.ref(raised.value)
        del failed, raised
        queue.launch(look).result(60)  # the thread has let go of it, too
        assert exception() is None
    finally:
        gc.enable()
        queue.close()
    assert free == [[True, True], [True, True]]


def test_a_device_that_failed_is_lost() -> None:
    gate = Gate()
    gate.error = RuntimeError("an illegal memory access was encountered")
    gate.reached.set()
    queue = LaunchQueue(False, completions=gate)
    with pytest.raises(DeviceLost, match="illegal memory access"):
        queue.launch(lambda: lambda: BatchResult(np.array([7]), [None])).result(60)
    queue.close()


def test_a_brief_forward_runs_on_the_callers_thread_unless_another_is_still_queued() -> None:
    may_end, order, threads = threading.Event(), list[str](), list[int]()

    def forward(name: str) -> Read:
        if name == "long":
            assert may_end.wait(60)
        order.append(name)
        threads.append(threading.get_ident())
        return lambda: BatchResult(np.array([len(order)]), [None])

    queue = LaunchQueue(overlap=True)
    queue.launch(lambda: forward("first"), is_brief=True)
    assert order == ["first"]
    long = queue.launch(lambda: forward("long"))
    behind = queue.launch(lambda: forward("behind"), is_brief=True)
    assert order == ["first"]
    may_end.set()
    long.result(60)
    behind.result(60)
    queue.launch(lambda: forward("last"), is_brief=True)
    queue.close()
    assert order == ["first", "long", "behind", "last"]
    me = threading.get_ident()
    assert [thread == me for thread in threads] == [True, False, False, True]


def test_a_brief_forward_that_fails_fails_when_its_result_is_taken() -> None:
    def forward() -> Read:
        raise IndexError("half-way")

    queue = LaunchQueue(overlap=True)
    launched = queue.launch(forward, is_brief=True)
    with pytest.raises(EngineError, match="half-way"):
        launched.result(60)
    queue.close()
