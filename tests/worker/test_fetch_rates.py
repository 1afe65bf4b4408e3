"""Which fetches are begun, by what earlier ones took."""

from __future__ import annotations

from worker.fetch_rates import FetchRates


def test_a_source_is_used_while_its_pages_come_faster_than_they_are_computed() -> None:
    rates = FetchRates()
    assert rates.pays("a", 1000, 0.1, now=0.0), "nothing is known: it is tried"
    rates.fetched("a", 1000, 0.2, now=0.0)
    assert not rates.pays("a", 1000, 0.1, now=1.0)
    assert rates.pays("a", 1000, 0.3, now=1.0)
    assert rates.pays("a", 1000, None, now=1.0), "nothing was computed here yet"
    assert rates.pays("b", 1000, 0.1, now=1.0), "another source"


def test_a_source_that_was_too_slow_is_tried_again_later() -> None:
    rates = FetchRates()
    rates.fetched("a", 1000, 5.0, now=0.0)
    assert not rates.pays("a", 1000, 0.1, now=9.0)
    assert rates.pays("a", 1000, 0.1, now=10.0)
    for second in range(11, 31):
        rates.fetched("a", 1000, 0.01, now=float(second))
    assert rates.pays("a", 1000, 0.1, now=31.0), "it has become fast"


def test_what_is_known_of_a_source_that_is_gone_is_forgotten() -> None:
    rates = FetchRates()
    rates.fetched("a", 1000, 5.0, now=0.0)
    rates.forget("a")
    assert rates.pays("a", 1000, 0.1, now=1.0)
