"""Trials of draft methods that currently do not pay off, to notice changes in cost or acceptance. Pure."""

from dataclasses import dataclass

# Maximum share of all time spent on trials. Halved with every `FREE_TRIALS` trials, `MAX_HALVINGS` times.
TIME_SHARE, MAX_HALVINGS = 0.01, 3
# Minimum share of a trial's time that counts as its cost.
MIN_LOSS = 0.1
# Initial trials without a time budget, since the costs are not known yet, and their maximum loss in plain rounds.
FREE_TRIALS, FREE_LOSS = 4, 0.75


@dataclass
class Trials:
    """Trials of one draft method."""

    made: int = 0
    """Trials so far; at most `FREE_TRIALS` of those before the last use of the method."""
    saved: float = 0.0
    """Seconds that the next trial may cost. Negative after a trial that cost more than expected."""
    _spent: float = 0.0
    """Savings that the last trial has used up."""

    def may_try(self, plain: float, rounds: int, seconds: float, gained: float) -> bool:
        """Whether to run a trial in this round, which would take `plain` seconds without it.

        `rounds`: since the last call, including this one. `seconds`: extra time of the trial. `gained`: time that plain
        decoding would need for the expected tokens.
        """
        self.saved += TIME_SHARE / 2 ** min(MAX_HALVINGS, self.made // FREE_TRIALS) * plain * rounds
        is_free = self.made < FREE_TRIALS and self.saved > -FREE_LOSS * plain
        if not is_free and self.saved < max(seconds - gained, MIN_LOSS * seconds):
            return False
        self.made, self.saved, self._spent = self.made + 1, min(0.0, self.saved), max(0.0, self.saved)
        return True

    def has_paid_off(self) -> None:
        """Call while the method is in use. A trial without a loss counts, too."""
        self.made = min(self.made, FREE_TRIALS)

    def settle(self, lost: float) -> None:
        """Charge a measured loss of the last trial, in seconds, beyond its savings."""
        if lost <= 0:
            self.has_paid_off()
        self.saved -= max(0.0, lost - self._spent)
        self._spent = max(0.0, self._spent - max(0.0, lost))
