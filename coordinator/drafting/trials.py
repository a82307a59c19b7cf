"""Trials of draft methods that do not pay now: only drafting shows when costs or acceptance change. Pure."""

from dataclasses import dataclass

# Share of all time that trials may cost, and the share of a trial's time that counts as its cost at least.
TIME_SHARE, MIN_LOSS = 0.01, 0.1
# Trials that need no savings, because rounds have not shown the costs yet.
FREE_TRIALS = 4


@dataclass
class Trials:
    """Trials of one draft method."""

    made: int = 0
    saved: float = 0.0
    """Seconds that the next trial may cost."""

    def may_try(self, plain: float, seconds: float, gained: float) -> bool:
        """Whether to make a trial in a round that takes `plain` seconds without one.

        `seconds`: extra time of the trial. `gained`: time that plain decoding would need for the expected tokens.
        """
        self.saved += TIME_SHARE * plain
        if self.made >= FREE_TRIALS and self.saved < max(seconds - gained, MIN_LOSS * seconds):
            return False
        self.made, self.saved = self.made + 1, 0.0
        return True
