"""Backoff of a link: longer after each failure, reset after enough uptime."""

from coordinator.workers.states import Backoff

RESET_AFTER = 10


def make(first: float = 1.0, second: float = 2.0, maximum: float = 30.0, reset_after: float = RESET_AFTER) -> Backoff:
    return Backoff(first, second, maximum, reset_after)


def test_pauses_double_up_to_the_maximum() -> None:
    backoff = make(first=0.0, second=1.0, maximum=5.0)
    assert [backoff.failed(0.0) for _ in range(6)] == [0.0, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_flapping_worker_pauses_longer_each_time() -> None:
    backoff, now, pauses = make(), 0.0, []
    for _ in range(5):
        pauses.append(backoff.failed(now))
        backoff.succeeded()
        now += pauses[-1] + 0.01
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0]


def test_uptime_resets_the_backoff_only_after_a_success() -> None:
    backoff = make()
    assert [backoff.failed(0.0), backoff.failed(1.0)] == [1.0, 2.0]
    assert backoff.failed(1000.0) == 4.0
    backoff.succeeded()
    assert backoff.failed(1004.0 + RESET_AFTER * 4.0 + 0.1) == 1.0


def test_one_success_can_be_enough_to_reset() -> None:
    backoff = make(first=0.0, second=0.05, maximum=2.0, reset_after=0)
    pauses = [backoff.failed(0.0), backoff.failed(1.0)]
    backoff.succeeded()
    assert [*pauses, backoff.failed(2.0)] == [0.0, 0.05, 0.0]
