"""Trials of draft methods that did not pay: costs and acceptance change, which only drafting shows. Pure."""

from dataclasses import dataclass

# The share of time that trials may cost, and the least share of a trial's time that counts as its cost, whatever it is
# expected to gain.
SHARE_OF_TIME, LEAST_LOSS = 0.01, 0.1
# Trials that need no savings: before them costs are not known from rounds.
FIRST_TRIALS = 4


@dataclass
class Trials:
    """Trials of one draft method."""

    made: int = 0
    saved: float = 0.0
    """Seconds that the next trial may cost."""

    def may_try(self, plain: float, seconds: float, gained: float) -> bool:
        """Whether to make a trial in a round that takes `plain` seconds without one.

        It would take `seconds` more, and gain tokens that take `gained` seconds of plain decoding.
        """
        self.saved += SHARE_OF_TIME * plain
        if self.made >= FIRST_TRIALS and self.saved < max(seconds - gained, LEAST_LOSS * seconds):
            return False
        self.made, self.saved = self.made + 1, 0.0
        return True
