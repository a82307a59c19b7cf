"""The retry delay of refused clients."""

import pytest

from coordinator.requests.in_flight import FIRST_RETRY, MAX_ENDS, MAX_RETRY, MIN_RETRY, EndRate


def rate_of(*ends: float) -> EndRate:
    rate = EndRate()
    rate.begin(100.0)
    for end in ends:
        rate.add(100.0 + end)
    return rate


def test_the_delay_follows_the_recent_rate() -> None:
    rate = rate_of(0.5, 1.0, 1.5, 2.0)
    assert rate.seconds_until(1, 102.0) == pytest.approx(0.5)
    assert rate.seconds_until(6, 102.0) == pytest.approx(3.0)


def test_the_delay_grows_while_nothing_ends() -> None:
    assert rate_of(0.5, 1.0).seconds_until(1, 108.0) == pytest.approx(4.0)


def test_the_first_delay_is_a_default() -> None:
    assert EndRate().seconds_until(3, 100.0) == rate_of().seconds_until(3, 150.0) == FIRST_RETRY


def test_idle_time_and_old_ends_do_not_count() -> None:
    rate = rate_of(50.0)
    rate.begin(500.0)
    for i in range(2 * MAX_ENDS):
        rate.add(510.0 + 0.2 * i)
    assert rate.seconds_until(1, 510.0 + 0.2 * (2 * MAX_ENDS - 1)) == pytest.approx(0.2)


def test_the_delay_is_bounded() -> None:
    assert rate_of(0.001).seconds_until(1, 100.002) == MIN_RETRY
    assert rate_of(1.0).seconds_until(64, 110.0) == MAX_RETRY
