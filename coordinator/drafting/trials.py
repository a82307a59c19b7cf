"""When to try again what did not pay: costs and acceptance change, and who never drafts never learns. Pure."""

from dataclasses import dataclass

# The share of the time that may be lost by trials, and the share of a trial's time that counts as lost at least,
# whatever it is expected to gain.
SHARE_OF_TIME, LEAST_LOSS = 0.01, 0.1
# The first ones need no saving: until then costs are not known from rounds.
FIRST_TRIALS = 4


@dataclass
class Trials:
    """Of one way to draft."""

    made: int = 0
    saved: float = 0.0
    """Seconds that the next one may cost."""

    def may_try(self, plain: float, seconds: float, gained: float) -> bool:
        """Whether to try it in a round that takes `plain` seconds otherwise, `seconds` more so, and gains what takes
        `gained` seconds plainly."""
        self.saved += SHARE_OF_TIME * plain
        if self.made >= FIRST_TRIALS and self.saved < max(seconds - gained, LEAST_LOSS * seconds):
            return False
        self.made, self.saved = self.made + 1, 0.0
        return True
