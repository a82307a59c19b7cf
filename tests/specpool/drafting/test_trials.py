"""Trials: rarer while they lose, and as frequent as before once they no longer do."""

from specpool.drafting.trials import FREE_TRIALS, TIME_SHARE, Trials

PLAIN, EXTRA = 1.0, 0.5


def rounds_until_next(trials: Trials) -> int:
    """Rounds until a trial that takes `EXTRA` and gains nothing."""
    rounds = 1
    while not trials.may_try(PLAIN, 1, EXTRA, 0.0):
        rounds += 1
    return rounds


def after_losses(count: int) -> Trials:
    trials = Trials()
    for _ in range(count):
        rounds_until_next(trials)
        trials.settle(EXTRA)
    return trials


def test_trials_that_lose_become_rarer_up_to_a_limit() -> None:
    first, later, last = (rounds_until_next(after_losses(count)) for count in (FREE_TRIALS + 1, 10, 40))
    assert first < later < last
    assert last == rounds_until_next(after_losses(80))
    assert EXTRA / last < TIME_SHARE / 4


def test_trials_that_gain_or_use_of_the_method_makes_trials_frequent_again() -> None:
    often, rarely = rounds_until_next(after_losses(FREE_TRIALS + 1)), rounds_until_next(after_losses(40))
    gaining, used = after_losses(40), after_losses(40)
    for _ in range(6):
        gaining.settle(-0.1)
    used.restart()
    assert rounds_until_next(gaining) <= often < rarely
    assert rounds_until_next(used) <= often


def test_a_stalled_trial_is_paid_for_at_the_full_rate() -> None:
    trials = after_losses(40)
    rounds_until_next(trials)
    trials.settle(4 * PLAIN)
    assert rounds_until_next(trials) < 1.1 * 4 * PLAIN / TIME_SHARE + rounds_until_next(after_losses(40))


def test_rounds_without_a_chance_to_try_count() -> None:
    trials = after_losses(40)
    rounds = rounds_until_next(after_losses(40))
    assert trials.may_try(PLAIN, rounds, EXTRA, 0.0)
