"""RoleController: roles follow the needs, without flapping, and no role is left without a worker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaling.roles import RoleController, Switch
from scaling.sample import Samples, WorkerSample


class Need:
    """A demand that is told its need."""

    def __init__(self, workers: float) -> None:
        self.need = workers

    def observe(self, samples: Samples, now: float) -> None:
        """Nothing is measured."""

    def workers(self, ahead_s: float) -> float:
        """As told."""
        return self.need


def fleet(letter: str, count: int) -> dict[str, WorkerSample]:
    """Workers; a higher number has more to do."""
    return {f"{letter}{number}": WorkerSample(rows=number, queued_tokens=number) for number in range(count)}


def switched(
    needs: tuple[float, float], prefill: int, decode: int, switching: frozenset[str] = frozenset()
) -> Switch:
    controller = RoleController(Need(needs[0]), Need(needs[1]), 5.0)
    return controller.switch(fleet("p", prefill), fleet("d", decode), switching, 0.0)


def test_the_least_loaded_switch_and_half_at_once() -> None:
    assert switched((7.0, 1.0), 4, 4) == Switch(to_prefill=("d0", "d1", "d2"))
    assert switched((1.0, 7.0), 4, 4) == Switch(to_decode=("p0", "p1", "p2"))
    assert len(switched((60.0, 1.0), 2, 62).to_prefill) == 32


def test_those_that_switch_count_for_their_new_role() -> None:
    assert switched((7.0, 1.0), 4, 4, frozenset({"d0"})) == Switch(to_prefill=("d1", "d2"))
    assert switched((9.0, 1.0), 1, 7, frozenset({"d0", "d3", "d4", "d5"})) == Switch(), "half switch already"
    assert switched((20.0, 10.0), 15, 9, frozenset({"d0"})) == Switch(), "with d0 it is as good as can be"


def test_a_fleet_with_reserve_stays() -> None:
    assert switched((2.0, 0.5), 4, 4) == Switch()


def test_a_small_gain_is_not_worth_a_drain() -> None:
    assert switched((4.2, 3.6), 4, 4) == Switch()


@pytest.mark.parametrize("sizes", [(1, 0), (0, 1), (0, 3), (1, 1)])
def test_there_is_nothing_to_switch(sizes: tuple[int, int]) -> None:
    assert switched((9.0, 9.0), *sizes) == Switch()


@given(st.floats(0.0, 100.0), st.floats(0.0, 100.0), st.integers(1, 63), st.integers(0, 20))
def test_steady_needs_settle_with_a_worker_in_each_role(p: float, d: float, here: int, turns: int) -> None:
    total, counts = 64, [here]
    for _ in range(turns + 8):
        wanted = switched((p, d), counts[-1], total - counts[-1])
        counts.append(counts[-1] + len(wanted.to_prefill) - len(wanted.to_decode))
        assert 1 <= counts[-1] <= total - 1
    assert counts[-1] == counts[-2], "steady needs end in a steady fleet"
