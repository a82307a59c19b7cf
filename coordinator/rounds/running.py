"""A running round: the round of a group, with its calls to the workers and what they took."""

import asyncio
import time
from collections.abc import Callable, Mapping

from coordinator.requests.traces import RoundTrace
from coordinator.scheduling.commits import Commit
from coordinator.scheduling.grouping import Group
from coordinator.scheduling.round import Round
from specpool.drafting.costs import Timed
from specpool.drafting.outcome import RoundOutcome
from specpool.drafting.plans import DraftPlan
from specpool.protocol.features import WantedFeatures


class RunningRound(Round):
    """A round between its plan and its publication."""

    def __init__(
        self,
        round_id: int,
        group: Group,
        plans: Mapping[int, DraftPlan],
        *,
        sent: Callable[[], None],
        may_join: bool,
        prefill_tokens: int,
        chance: Callable[[float], float],
        pass_seconds: Callable[[int], float],
        features: WantedFeatures | None,
    ) -> None:
        """`sent`: called when the next round may be chosen. `may_join`: whether it may share a pass with the last one.

        For the other arguments see `Round`.
        """
        super().__init__(round_id, group.sequences, prefill_tokens, plans, chance, pass_seconds, features)
        self.group, self.may_join, self.same_length = group, may_join, group.same_length
        """`same_length`: whether the sequences had equal lengths when the group was chosen."""
        self.sent = sent
        self.trace = RoundTrace()
        self.instance_id = ""
        """The target process whose caches the round assumes."""
        self.began = 0.0
        self.proposed = Timed()
        self.outcome: RoundOutcome[Commit] = RoundOutcome([], Timed(), [], is_trial=self.is_trial)
        self.committed = asyncio.Event()
        """Set once the round has committed or failed."""
        self.failed = False
        self.following: RunningRound | None = None
        """The round sent after this one, while this one was in flight."""
        self.drafting_ahead: asyncio.Task[None] | None = None
        """Drafts branches during the verification."""

    def begin(self, instance_id: str, is_quiet: bool) -> None:
        """Start the clock. `is_quiet`: see `RoundOutcome`."""
        self.began, self.instance_id, self.outcome.is_quiet = time.perf_counter(), instance_id, is_quiet

    def fail(self) -> None:
        """Drop the results of this round, and of those that continue it."""
        self.failed = True
        self.discard()
        if self.drafting_ahead is not None:
            self.drafting_ahead.cancel()
