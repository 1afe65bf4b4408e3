from __future__ import annotations

import pytest

from common import polling
from common.polling import poll


class Clock:
    """Time that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(polling, "time", clock)
    return clock


def test_what_is_over_is_not_waited_for(clock: Clock) -> None:
    assert poll(lambda: True, 0.0)
    assert not clock.pauses


@pytest.mark.parametrize("takes_s", [0.0003, 0.004, 0.05, 2.0])
def test_the_answer_is_late_by_a_small_part_of_the_time(clock: Clock, takes_s: float) -> None:
    assert poll(lambda: clock.now >= 100 + takes_s, 60.0)
    assert clock.now - 100 - takes_s <= max(takes_s / 60, 1e-5) + 1e-9
    assert len(clock.pauses) < 100 * (1 + 1000 * takes_s)
    assert max(clock.pauses) <= 1e-3


@pytest.mark.parametrize("timeout_s", [0.0, 0.0005, 3.0])
def test_a_wait_ends_at_its_bound(clock: Clock, timeout_s: float) -> None:
    assert not poll(lambda: False, timeout_s)
    assert clock.now - 100 == pytest.approx(timeout_s)


def test_an_error_of_what_is_asked_is_raised(clock: Clock) -> None:
    def fails() -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        poll(fails, 60.0)
