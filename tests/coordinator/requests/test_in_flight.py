"""The time after which a refused client is told to try again."""

import pytest

from coordinator.requests.in_flight import FIRST_RETRY, MAX_ENDS, MAX_RETRY, MIN_RETRY, EndRate


def rate_of(*ends: float) -> EndRate:
    rate = EndRate()
    rate.begin(100.0)
    for end in ends:
        rate.add(100.0 + end)
    return rate


def test_it_is_that_of_the_recent_ends() -> None:
    rate = rate_of(0.5, 1.0, 1.5, 2.0)
    assert rate.seconds_until(1, 102.0) == pytest.approx(0.5)
    assert rate.seconds_until(6, 102.0) == pytest.approx(3.0)


def test_it_grows_while_nothing_ends() -> None:
    assert rate_of(0.5, 1.0).seconds_until(1, 108.0) == pytest.approx(4.0)


def test_before_the_first_end_nothing_is_known() -> None:
    assert EndRate().seconds_until(3, 100.0) == rate_of().seconds_until(3, 150.0) == FIRST_RETRY


def test_idle_time_and_old_ends_do_not_count() -> None:
    rate = rate_of(50.0)
    rate.begin(500.0)
    for i in range(2 * MAX_ENDS):
        rate.add(510.0 + 0.2 * i)
    assert rate.seconds_until(1, 510.0 + 0.2 * (2 * MAX_ENDS - 1)) == pytest.approx(0.2)


def test_it_is_neither_too_short_nor_too_long() -> None:
    assert rate_of(0.001).seconds_until(1, 100.002) == MIN_RETRY
    assert rate_of(1.0).seconds_until(64, 110.0) == MAX_RETRY
