"""How old the load in a worker's record is."""

from __future__ import annotations

from unittest import mock

from tests.support.hand_off import Pair, pair
from wire.records import WorkerLoad


def ages(load: WorkerLoad) -> tuple[float, float, float]:
    """Of the last turn, of the figures, and of the mail that they include."""
    return load.since_turn_s, load.age_s, load.mail_age_s


def turn(both: Pair, forward_s: float, busy: bool = True) -> WorkerLoad:
    """A turn of prefill. Returns the load that its heartbeat tells at the end of the forward."""
    told = []

    def step() -> bool:
        both.clock.now += forward_s
        told.append(both.prefill.record().load)
        return busy

    with mock.patch.object(both.prefill.parts.role.scheduler, "step", step):
        both.turn(both.prefill)
    return told[0]


def test_mail_is_as_old_as_the_turn_that_took_it() -> None:
    with pair() as both:
        turn(both, 1.5)
        both.clock.now += 0.5
        assert ages(both.prefill.record().load) == (0.5, 0.5, 2.0)
        assert ages(turn(both, 1.0)) == (1.5, 1.5, 3.0), "a forward is under way: the figures are of before"
        assert ages(both.prefill.record().load) == (0.0, 0.0, 1.0)


def test_figures_may_be_older_than_the_last_turn() -> None:
    with pair() as both:
        turn(both, 0.02, busy=False)
        turn(both, 0.03)  # too soon for another look
        both.clock.now += 1.0
        assert ages(both.prefill.record().load) == (1.0, 1.03, 1.05)
