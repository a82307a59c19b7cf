"""Running one round with the workers: the draft worker proposes, the target worker verifies, and both are timed.

A draft worker that fails costs its drafts only: the round goes on without them.
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from coordinator.config.settings import Overlap
from coordinator.drafting.drafting import Drafting, DraftWorker
from coordinator.scheduling.commits import Commit
from coordinator.scheduling.counters import Counters, Timed
from coordinator.scheduling.grouping import Group
from coordinator.scheduling.pool import Pool
from coordinator.scheduling.round import Round
from coordinator.scheduling.sequence import Sequence
from coordinator.tracing.traces import UNTRACED, RoundTrace, Traces
from coordinator.workers.errors import WorkerRefusedError, WorkerUnreachableError
from coordinator.workers.interface import Workers
from specpool.protocol.rounds import ItemStatus, Verdict, VerifyItem

log = logging.getLogger(__name__)

# Most groups in flight at a time: one that is drafted for and one that is verified.
MOST_LANES = 2


@dataclass(frozen=True)
class RoundSettings:
    """How rounds are run."""

    prefill_tokens: int
    """The budget of a round for prompt tokens, for each worker."""
    overlap: Overlap


class RoundEvents(Protocol):
    """What is reported of sequences; `coordinator.requests.in_flight.RequestsInFlight` takes it in."""

    def admitted(self, sequence: Sequence) -> None:
        """The sequence entered the window."""

    def committed(self, commit: Commit) -> None:
        """A round gained tokens for a sequence."""

    def failed(self, sequence: Sequence, reason: str) -> None:
        """The sequence was given up."""


class RoundRunner:
    """Runs rounds; two at a time where one group can be drafted for while the other is verified."""

    def __init__(
        self,
        *,
        pool: Pool,
        workers: Workers,
        drafting: Drafting,
        settings: RoundSettings,
        events: RoundEvents,
        traces: Traces = UNTRACED,
    ) -> None:
        self.counters = Counters()
        self._traces = traces
        self._pool, self._workers, self._drafting = pool, workers, drafting
        self._settings, self._events = settings, events
        self._target_free, self._draft_free = asyncio.Lock(), asyncio.Lock()
        self._round_ids = count(1)

    @property
    def lanes(self) -> int:
        """Groups that may be in flight at a time."""
        return MOST_LANES if self._can_overlap and self._drafting.halves_pay(self._pool.schedulable) else 1

    @property
    def _can_overlap(self) -> bool:
        """Whether both workers can be busy at a time without slowing each other down."""
        draft = self._workers.ready_draft
        if draft is None or self._settings.overlap == "off":
            return False
        their = self._workers.target.hosts_and_devices
        return self._settings.overlap == "on" or draft.hosts_and_devices.isdisjoint(their)

    async def run(self, group: Group) -> bool:
        """Runs one round. False if no sequence of the group made progress.

        WorkerUnreachableError, WorkerRefusedError: the target worker's; nothing was committed.
        """
        with self._traces.round(group) as trace:
            return await self._run(group, trace)

    async def _run(self, group: Group, trace: RoundTrace) -> bool:
        began = time.perf_counter()
        same_length = group.same_length
        round_ = self._begin(group)
        proposed = await self._propose(round_, trace)
        items = round_.verify_items()
        if not items:
            return False
        verdicts, verified = await self._verify(round_, items, trace)
        self._drafting.observe_verification(items, verified)
        commits = round_.commit(verdicts)
        for commit in commits:
            self.counters.add_commit(commit)
            self._drafting.observe(commit)
            self._events.committed(commit)
        trace.committed(round_.round_id, commits, round_.cache_misses)
        self.counters.rounds += 1
        self.counters.cache_misses += round_.cache_misses
        self.counters.grouping.add(group, same_length)
        self.counters.add_times(proposed, verified, time.perf_counter() - began)
        return any(verdict.status is not ItemStatus.NO_SLOT for verdict in verdicts)

    def _begin(self, group: Group) -> Round:
        round_id = next(self._round_ids)
        self._update_costs()
        orders = self._drafting.orders(group.sequences, self._draft_worker(round_id))
        chance = self._drafting.calibration.chance
        return Round(round_id, group.sequences, self._settings.prefill_tokens, orders, chance)

    def _update_costs(self) -> None:
        """Hands the workers' step times to `drafting`: a worker that was away has new ones."""
        self._drafting.costs.verify = self._workers.target.step_times
        if (draft := self._workers.ready_draft) is not None:
            self._drafting.costs.draft = draft.step_times

    def _draft_worker(self, round_id: int) -> DraftWorker | None:
        """The draft worker as `drafting` sees it; None if it cannot be asked now."""
        draft = self._workers.ready_draft
        return DraftWorker(draft.max_model_len, round_id) if draft is not None else None

    async def _propose(self, round_: Round, trace: RoundTrace) -> Timed:
        draft, target = self._workers.ready_draft, self._workers.target
        items = round_.propose_items(draft.max_model_len, draft.vocab_size) if draft is not None else []
        if draft is None or not items:
            return Timed()
        began = time.perf_counter()
        try:
            async with self._draft_free:
                with trace.calling("propose", round_.round_id) as parent:
                    proposals, timed = await draft.propose(round_.round_id, items, *self._drafting.hints, parent)
            round_.take_proposals(proposals, target.vocab_size)
            self._drafting.observe_proposals(items, proposals, timed)
        except (WorkerUnreachableError, WorkerRefusedError):
            # The link has logged it; this round decodes plainly.
            return Timed(elapsed=time.perf_counter() - began)
        except Exception:  # nothing that a draft worker does may fail a request
            log.exception("the proposals of a round could not be used")
            return Timed(elapsed=time.perf_counter() - began)
        return timed

    async def _verify(self, round_: Round, items: list[VerifyItem], trace: RoundTrace) -> tuple[list[Verdict], Timed]:
        """Has the target worker verify; a draft worker that is idle meanwhile drafts ahead."""
        drafting_ahead: asyncio.Task[None] | None = None
        if self._can_overlap and self.lanes == 1:
            drafting_ahead = asyncio.create_task(self._draft_ahead(round_, items, trace))
        try:
            async with self._target_free:
                with trace.calling("verify", round_.round_id) as parent:
                    verified = await self._workers.target.verify(round_.round_id, items, parent)
        except BaseException:
            if drafting_ahead is not None:
                drafting_ahead.cancel()
            raise
        if drafting_ahead is not None:
            await drafting_ahead
        return verified

    async def _draft_ahead(self, round_: Round, verified: list[VerifyItem], trace: RoundTrace) -> None:
        """Has the draft worker go on as if all of its tokens were accepted."""
        draft = self._workers.draft
        assert draft is not None
        items = round_.ahead_items(self._drafting.steps_beside(verified), draft.max_model_len)
        if not items:
            return
        try:
            async with self._draft_free:
                with trace.calling("propose", round_id := next(self._round_ids)) as parent:
                    proposals, timed = await draft.propose(round_id, items, *self._drafting.hints, parent)
            round_.take_ahead(proposals, self._workers.target.vocab_size)
            self._drafting.observe_proposals(items, proposals, timed)
            self.counters.stage_seconds["draft"] += timed.forward
        except (WorkerUnreachableError, WorkerRefusedError):
            return  # the link has logged it
        except Exception:
            log.exception("what was drafted ahead could not be used")
