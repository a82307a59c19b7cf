"""Decides when vLLM's rows get drafts, so that drafts do not cost more time than they save. Pure.

Draft plans rely on estimates. They apply only after measuring plain steps with the same number of rows, and steps with
one more token per row. They stop applying when drafts have cost more time than they saved.
"""

import enum
from dataclasses import dataclass

from specpool.vllm.costs import StepCosts

# For each number of rows: plain steps before the first drafts, probes after them, and steps between later probes.
PLAIN_STEPS, PROBES, STEPS_PER_PROBE = 6, 2, 256
# Maximum share of time for plain steps where drafts pay.
PLAIN_SHARE = 0.005
# Allowed cost of drafts, in plain steps: per step, and initially. Clamping the balance keeps old gains from paying for
# new losses, and one long stall from ruling out drafts for long.
ALLOWANCE, FIRST_BALANCE, MAX_BALANCE = 0.01, 4.0, 16.0


class Mode(enum.Enum):
    """Purpose of the next step."""

    PLAIN = "plain"
    """No drafts: measure a plain step, or make up for a loss."""
    PROBE = "probe"
    """One arbitrary draft token per row, to measure verification."""
    PLANNED = "planned"
    """Drafts that are expected to save time, if any."""


@dataclass
class Pacing:
    """Chooses the mode of each step, and tracks the time that drafts save."""

    costs: StepCosts
    balance: float = FIRST_BALANCE
    """Time saved by drafts, in plain steps."""
    _since_plain: int = 0
    _since_probe: int = 0

    def mode(self, rows: int, expected_speed: float) -> Mode:
        """Mode of a step in which this number of rows decodes.

        `expected_speed`: tokens per second by the draft plan; 0 without drafts.
        """
        self._since_plain += 1
        self._since_probe += 1
        times = self.costs.verify
        gain = expected_speed * times(rows) / rows - 1
        is_plain_due = PLAIN_SHARE < gain < self._since_plain * PLAIN_SHARE
        if times.seen(rows) < PLAIN_STEPS or self.balance <= 0 or is_plain_due:
            return Mode.PLAIN
        if times.seen(2 * rows) < PROBES or (not expected_speed and self._since_probe > STEPS_PER_PROBE):
            self._since_probe = 0
            return Mode.PROBE
        return Mode.PLANNED

    def is_measured(self, rows: int) -> bool:
        """Whether plain steps and verification are measured for this number of rows."""
        times = self.costs.verify
        return times.seen(rows) >= PLAIN_STEPS and times.seen(2 * rows) >= PROBES

    def observe(
        self, rows: int, tokens: int, gained: int, step_seconds: float, draft_seconds: float, skipped: int = 0
    ) -> None:
        """Record a step in which all rows decoded: its tokens, the tokens gained, and its duration.

        `draft_seconds`: duration of drafting before it; 0 if the draft worker was not asked. `skipped`: number of
        unobserved steps before it.
        """
        times = self.costs.verify
        times.observe(tokens, step_seconds)
        saved = 0.0
        if tokens > rows or draft_seconds:
            saved = gained / rows - (step_seconds + draft_seconds) / times(rows)
        else:
            self._since_plain = 0
        self.balance = min(MAX_BALANCE, max(-MAX_BALANCE, self.balance + (1 + skipped) * ALLOWANCE + saved))
