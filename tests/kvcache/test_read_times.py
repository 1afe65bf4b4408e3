"""When a read from storage should pay, by the reads before it."""

from __future__ import annotations

import pytest

from kvcache.tiers.read_times import ReadTimes


def measured(*reads: tuple[int, float]) -> ReadTimes:
    """After reads of so many pages and seconds, at the time 0."""
    times = ReadTimes()
    for pages, seconds in reads:
        times.measured(pages, seconds, 0.0)
    return times


def test_latency_and_rate_are_told_apart() -> None:
    times = measured((10, 0.6), (110, 1.6), (60, 1.1))
    assert times.expected_s(1000) == pytest.approx(0.5 + 1000 * 0.01)
    assert times.expected_s(1) == pytest.approx(0.51)


def test_reads_of_one_size_tell_no_latency() -> None:
    times = measured(*[(20, 0.4)] * 20)
    assert times.expected_s(20) == pytest.approx(0.4)
    assert times.expected_s(40) == pytest.approx(0.8)


def test_a_read_that_finds_nothing_tells_the_latency() -> None:
    times = measured((0, 0.3), (100, 1.3))
    assert times.expected_s(10) == pytest.approx(0.4)


@pytest.mark.parametrize("reads", [[(100, 0.1), (10, 1.0)], [(10, 0.01), (100, 1.0)]])
def test_scattered_reads_give_no_negative_time(reads: list[tuple[int, float]]) -> None:
    for pages in (0, 1, 10, 10_000):
        expected = measured(*reads).expected_s(pages)
        assert expected is not None
        assert expected >= 0


def test_what_is_not_known_pays() -> None:
    assert measured().pays(10, 1e-9)
    assert measured((0, 5.0)).pays(10, 5.1), "a miss says nothing of the rate"
    assert measured((10, 5.0)).pays(10, None)


def test_a_storage_that_never_delivers_is_not_waited_for() -> None:
    times = measured(*[(0, 10.0)] * 3)
    assert times.expected_s(10) == pytest.approx(10.0)
    assert not times.pays(10, 9.9)
    assert times.pays(10, None)


def test_after_thousands_of_misses_the_latency_alone_is_known() -> None:
    times = measured((100, 1.0), *[(0, 0.01)] * 6000)
    assert times.expected_s(1000) == pytest.approx(0.01)


def test_the_faster_way_is_taken() -> None:
    times = measured((0, 0.1), (100, 1.1))
    assert times.pays(50, 0.61)
    assert not times.pays(50, 0.59)


def test_new_reads_count_more() -> None:
    times = measured(*[(10, 10.0)] * 50, *[(10, 0.1)] * 40)
    assert times.pays(10, 0.2)


@pytest.mark.parametrize(("pages", "stood_still"), [(0, 0), (100, 0), (100, 100)])
def test_one_read_of_half_a_minute_does_not_shut_the_storage_off(pages: int, stood_still: int) -> None:
    usual = (pages, 0.005 + pages * 0.0005)
    assert measured(*[usual] * 40, (stood_still, 30.0)).pays(100, 0.32)


def test_the_first_read_that_brings_pages_counts_as_it_is() -> None:
    assert measured(*[(0, 0.005)] * 40, (100, 2.0)).expected_s(100) == pytest.approx(2.0, rel=0.01)


def test_a_storage_that_has_become_slow_is_left_soon() -> None:
    assert not measured(*[(100, 0.055)] * 40, *[(100, 30.0)] * 4).pays(100, 0.32)


def test_a_storage_without_latency_may_become_slow() -> None:
    assert not measured(*[(0, 0.0)] * 40, *[(0, 1.0)] * 10).pays(100, 0.32)


def test_a_slow_storage_is_tried_again_by_time_and_by_number() -> None:
    times = measured((10, 1.0))
    assert not any(times.try_again(29.0) for _ in range(63))
    assert times.try_again(29.0)
    assert not times.try_again(58.0)
    assert times.try_again(59.0)
