"""Rests of a link: longer with each failure, until it has worked for long enough."""

from coordinator.workers.backoff import Breaker

FORGIVEN_AFTER = 10


def test_rests_double_up_to_the_longest() -> None:
    breaker = Breaker(5.0, FORGIVEN_AFTER)
    assert [breaker.failed(0.0, 0.0, 1.0) for _ in range(6)] == [0.0, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_one_that_fails_in_every_second_round_rests_longer_each_time() -> None:
    breaker, now, rests = Breaker(30.0, FORGIVEN_AFTER), 0.0, []
    for _ in range(5):
        rests.append(breaker.failed(now, 1.0, 2.0))
        breaker.worked()
        now += rests[-1] + 0.01
    assert rests == [1.0, 2.0, 4.0, 8.0, 16.0]


def test_one_that_has_worked_for_long_is_forgiven() -> None:
    breaker = Breaker(30.0, FORGIVEN_AFTER)
    first, second = breaker.failed(0.0, 1.0, 2.0), breaker.failed(1.0, 1.0, 2.0)
    assert (first, second) == (1.0, 2.0)
    breaker.worked()
    assert breaker.failed(3.0 + FORGIVEN_AFTER * 2.0 + 0.1, 1.0, 2.0) == 1.0


def test_time_alone_does_not_count() -> None:
    breaker = Breaker(30.0, FORGIVEN_AFTER)
    breaker.failed(0.0, 1.0, 2.0)
    assert breaker.failed(1000.0, 1.0, 2.0) == 2.0


def test_one_success_can_be_enough() -> None:
    breaker = Breaker(2.0, forgiven_after=0)
    rests = [breaker.failed(0.0, 0.0, 0.05), breaker.failed(1.0, 0.0, 0.05)]
    breaker.worked()
    assert [*rests, breaker.failed(2.0, 0.0, 0.05)] == [0.0, 0.05, 0.0]
