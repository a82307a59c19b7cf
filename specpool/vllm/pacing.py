"""When vLLM's rows may have drafts, so that drafts never cost more than they gain: by what steps did take. Pure.

Plans of drafts are made of estimates. They are followed once plain steps of as many rows, and steps with one more token
for each row, have been measured, and as long as drafts have saved time so far.
"""

import enum
from dataclasses import dataclass

from specpool.vllm.costs import StepCosts

# Plain steps of a number of rows before its first drafts; probes then, and plain steps after which there is one more.
PLAIN_STEPS, PROBES, STEPS_PER_PROBE = 6, 2, 256
# The share of time that plain steps may cost where drafts pay.
SHARE_OF_PLAIN = 0.005
# Plain steps that drafts may cost: in each step, and at first. The balance stays within so many of zero: gains of long
# ago do not pay for losses, nor does one long stop rule drafts out for long.
ALLOWANCE, FIRST_BALANCE, MOST_BALANCE = 0.01, 4.0, 16.0


class Mode(enum.Enum):
    """What the next step is for."""

    PLAIN = "plain"
    """No drafts: the time of plain steps has to be known, or drafts have cost more than they gained."""
    PROBE = "probe"
    """One draft token for each row, whatever it is: the time of its verification has to be known."""
    PLANNED = "planned"
    """The drafts that promise to save time, possibly none."""


@dataclass
class Pacing:
    """Chooses the mode of each step, and takes in what became of it."""

    costs: StepCosts
    balance: float = FIRST_BALANCE
    """What drafts have saved, in plain steps."""
    _since_plain: int = 0
    _since_probe: int = 0

    def mode(self, rows: int, promised: float) -> Mode:
        """The mode of a step in which this number of rows decodes.

        `promised`: tokens per second by the plan of drafts; 0 if it has none.
        """
        self._since_plain += 1
        self._since_probe += 1
        times = self.costs.verify
        gain = promised * times(rows) / rows - 1
        is_due = SHARE_OF_PLAIN < gain < self._since_plain * SHARE_OF_PLAIN
        if times.seen(rows) < PLAIN_STEPS or self.balance <= 0 or is_due:
            return Mode.PLAIN
        if times.seen(2 * rows) < PROBES or (not promised and self._since_probe > STEPS_PER_PROBE):
            self._since_probe = 0
            return Mode.PROBE
        return Mode.PLANNED

    def knows(self, rows: int) -> bool:
        """Whether it is known what plain steps of this number of rows take, and what drafts would cost them."""
        times = self.costs.verify
        return times.seen(rows) >= PLAIN_STEPS and times.seen(2 * rows) >= PROBES

    def observe(
        self, rows: int, tokens: int, gained: int, step_seconds: float, draft_seconds: float, skipped: int = 0
    ) -> None:
        """Takes in a step of rows that all decoded: the tokens that it ran and gained, and its time.

        `draft_seconds`: the time that drafting took before it; 0 if nothing was asked of the draft worker. `skipped`:
        steps before it that were not looked at.
        """
        times = self.costs.verify
        times.observe(tokens, step_seconds)
        saved = 0.0
        if tokens > rows or draft_seconds:
            saved = gained / rows - (step_seconds + draft_seconds) / times(rows)
        else:
            self._since_plain = 0
        self.balance = min(MOST_BALANCE, max(-MOST_BALANCE, self.balance + (1 + skipped) * ALLOWANCE + saved))
