"""ObjectiveScaler: it adds at once, removes late, and does not flap."""

from __future__ import annotations

from scaling.objective import ObjectiveScaler
from scaling.sample import Samples


class Needs:
    """A demand that is told what it needs."""

    def __init__(self) -> None:
        self.now = self.soon = 0.0

    def observe(self, samples: Samples, now: float) -> None:
        """Nothing is measured."""

    def workers(self, ahead_s: float) -> float:
        """More is needed soon than now."""
        return self.soon if ahead_s else self.now


def scaler() -> tuple[ObjectiveScaler, Needs]:
    needs = Needs()
    return ObjectiveScaler(needs, start_s=60.0, hold_s=30.0), needs


def test_workers_are_added_for_what_comes() -> None:
    one, needs = scaler()
    needs.now, needs.soon = 2.0, 3.4
    assert one.target({}, 0.0, 2) == 4


def test_workers_leave_when_fewer_were_enough_for_a_while() -> None:
    one, needs = scaler()
    needs.now = 5.0
    assert one.target({}, 0.0, 5) == 5
    needs.now = 2.0
    assert [one.target({}, at, 5) for at in (10.0, 20.0, 30.0)] == [5, 5, 5]
    assert one.target({}, 31.0, 5) == 2


def test_a_need_that_swings_keeps_the_larger_number() -> None:
    one, needs = scaler()
    targets, current = [], 3
    for turn in range(40):
        needs.now = 3.0 if turn % 4 == 0 else 2.0
        current = one.target({}, 5.0 * turn, current)
        targets.append(current)
    assert set(targets) == {3}


def test_after_a_gap_fewer_must_be_enough_for_a_while_again() -> None:
    one, needs = scaler()
    needs.now = 5.0
    assert [one.target({}, 10.0 * turn, 5) for turn in range(10)] == [5] * 10
    needs.now = 1.0  # what came in the gap is not known, or too old
    assert [one.target({}, 3600.0 + at, 5) for at in (0.0, 10.0, 20.0)] == [5, 5, 5]
    needs.now = 5.0
    assert one.target({}, 3630.0, 5) == 5


def test_one_worker_stays() -> None:
    one, _ = scaler()
    assert [one.target({}, at, 3) for at in (0.0, 40.0)] == [3, 1]
