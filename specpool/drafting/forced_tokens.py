"""Decides whether the target worker may append forced tokens. Pure.

Forced tokens spell the only text that a grammar allows. The target rejects them if it tokenizes that text differently,
and each of them costs a row of the verification.
"""

from specpool.drafting.acceptance import OVERALL_DECAY, Acceptance

# Initial acceptance rate.
FIRST_RATE = 0.9
# While forced tokens cost more than they gain, one in this many rounds allows them.
TRIAL_EVERY = 64


class ForcedTokens:
    """The acceptance rate of forced tokens, over all sequences."""

    def __init__(self) -> None:
        self._acceptance = Acceptance(OVERALL_DECAY)
        self._since_allowed = 0

    @property
    def rate(self) -> float:
        return self._acceptance.rate(FIRST_RATE)

    def observe(self, forced: int, accepted: int) -> None:
        """Learn from forced tokens after a fully accepted draft."""
        self._acceptance.add(forced, accepted)

    def are_allowed(self, row: float, measures_plain: bool) -> bool:
        """Whether the next round may have forced tokens.

        `row`: cost of a row in tokens. `measures_plain`: whether the round measures the time of plain decoding.
        """
        self._since_allowed += 1
        if measures_plain or (self.rate < row and self._since_allowed < TRIAL_EVERY):
            return False
        self._since_allowed = 0
        return True
