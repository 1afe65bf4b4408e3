"""The watchdog and threads that end, stand still, or are slow within their bound."""

from __future__ import annotations

import threading

import pytest

from worker.watchdog import Watchdog, Watched

PATIENCE_S = 20.0


class Rounds:
    """A thread that is not there."""

    def __init__(self) -> None:
        self.running = True
        self._beats = 0
        self.turning = True

    @property
    def beats(self) -> int:
        self._beats += self.turning
        return self._beats


class Dog:
    """A watchdog over a loop and a helper, and what it found."""

    def __init__(self, bound_s: float = 0.5) -> None:
        self.loop, self.helper = Rounds(), Rounds()
        self.bound_s = bound_s
        self.found: list[str] = []
        self.bitten = threading.Event()
        watched = [
            Watched("loop", self.loop, lambda: self.bound_s),
            Watched("helper", self.helper, lambda: 100.0),
        ]
        self.watchdog = Watchdog(watched, self._bite)
        self.watchdog.start()

    def _bite(self, why: str) -> None:
        self.found.append(why)
        self.bitten.set()


def test_a_dead_thread_is_found_when_it_says_so() -> None:
    dog = Dog()
    dog.helper.running = False
    dog.watchdog.look_now()
    assert dog.bitten.wait(PATIENCE_S)
    assert dog.found == ["the helper has died"] == [dog.watchdog.failure]
    dog.watchdog.close()


def test_a_thread_that_stands_still_is_found_after_its_bound_and_once() -> None:
    dog = Dog()
    dog.loop.turning = False
    assert dog.bitten.wait(PATIENCE_S)
    dog.watchdog.close()
    assert len(dog.found) == 1
    assert dog.found[0].startswith("the loop has been stuck")


def test_the_log_says_where_each_thread_is(caplog: pytest.LogCaptureFixture) -> None:
    may_end = threading.Event()

    def wait_in_here() -> None:
        may_end.wait(PATIENCE_S)

    stuck = threading.Thread(target=wait_in_here, name="helper")
    stuck.start()
    dog = Dog()
    dog.helper.running = False
    dog.watchdog.look_now()
    assert dog.bitten.wait(PATIENCE_S)
    may_end.set()
    stuck.join()
    dog.watchdog.close()
    (record,) = caplog.records
    assert record.getMessage().startswith("the helper has died: this worker gives up\n")
    of_helper = record.getMessage().partition("thread helper:\n")[2].partition("\nthread ")[0]
    assert "wait_in_here" in of_helper


def test_a_slow_thread_within_its_bound_and_one_that_comes_round_are_left_alone() -> None:
    dog = Dog(bound_s=50.0)
    dog.loop.turning = False
    assert not dog.bitten.wait(1.5)
    dog.loop.turning = True
    dog.bound_s = 0.6
    assert not dog.bitten.wait(1.5)
    dog.watchdog.close()
    assert dog.watchdog.failure is None
