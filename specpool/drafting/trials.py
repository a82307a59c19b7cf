"""Trials of draft methods that currently do not pay off, to notice changes in cost or acceptance. Pure."""

from dataclasses import dataclass

# Maximum share of all time spent on trials. Halved with every `TRIALS_PER_HALVING` trials that lose time, at most
# `MAX_HALVINGS` times. A trial that loses none makes up for `WORTH_OF_GAIN` others.
TIME_SHARE, TRIALS_PER_HALVING, MAX_HALVINGS, WORTH_OF_GAIN = 0.01, 4, 3, 2
# Minimum share of a trial's time that counts as its cost.
MIN_LOSS = 0.1
# Initial trials without a time budget, since the costs are not known yet, and their maximum loss in plain rounds.
FREE_TRIALS, FREE_LOSS = 4, 0.75


@dataclass
class Trials:
    """Trials of one draft method."""

    made: int = 0
    saved: float = 0.0
    """Seconds that the next trial may cost. Negative after a trial that cost more than expected."""
    _spent: float = 0.0
    """Savings that the last trial has used up."""
    _losses: int = 0
    """Trials that lost time since the method was used, less those made up for."""

    def may_try(self, plain: float, rounds: int, seconds: float, gained: float) -> bool:
        """Whether to run a trial in this round, which would take `plain` seconds without it.

        `rounds`: since the model's last chance to draft, including this one. `seconds`: extra time of the trial.
        `gained`: time that plain decoding would need for the expected tokens.
        """
        self.saved += self._time_share * plain * rounds
        is_free = self.made < FREE_TRIALS and self.saved > -FREE_LOSS * plain
        if not is_free and self.saved < max(seconds - gained, MIN_LOSS * seconds):
            return False
        self.made, self.saved, self._spent = self.made + 1, min(0.0, self.saved), max(0.0, self.saved)
        return True

    @property
    def _time_share(self) -> float:
        """The share of time to save. Debts are repaid at the full rate."""
        return TIME_SHARE / 2 ** (self._losses // TRIALS_PER_HALVING) if self.saved >= 0 else TIME_SHARE

    def restart(self) -> None:
        """Make trials frequent again. Call while the method is in use."""
        self._losses = 0

    def settle(self, lost: float) -> None:
        """Charge a measured loss of the last trial, in seconds, beyond its savings."""
        losses = self._losses + (1 if lost > 0 else -WORTH_OF_GAIN)
        self._losses = min(max(0, losses), MAX_HALVINGS * TRIALS_PER_HALVING)
        self.saved -= max(0.0, lost - self._spent)
        self._spent = max(0.0, self._spent - max(0.0, lost))
