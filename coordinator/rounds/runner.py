"""Runs one round with the workers: the draft worker proposes, the target worker verifies.

If the draft worker fails, the round continues without its drafts.
"""

import asyncio
import copy
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from coordinator.config.settings import Overlap
from coordinator.drafting.drafting import Drafting, DraftWorker
from coordinator.drafting.outcome import RoundOutcome
from coordinator.requests.in_flight import RequestsInFlight
from coordinator.scheduling.counters import Counters, Timed
from coordinator.scheduling.grouping import Group
from coordinator.scheduling.pool import Pool
from coordinator.scheduling.round import Round
from coordinator.scheduling.worker_time import Part
from coordinator.tracing.traces import RoundTrace, Traces
from coordinator.workers.errors import Cause, WorkerRefusedError, WorkerUnreachableError
from coordinator.workers.interface import Draft, Workers
from specpool.protocol.rounds import ItemStatus, Proposal, ProposeItem, VerifyItem

log = logging.getLogger(__name__)

# One group drafts while another is verified.
MAX_PIPELINE_DEPTH = 2
RETRY_SECONDS = 0.05


class RoundRunner:
    """Runs rounds. Overlaps two groups if that is faster: one drafts while the other is verified."""

    def __init__(
        self,
        pool: Pool,
        workers: Workers,
        drafting: Drafting,
        in_flight: RequestsInFlight,
        traces: Traces,
        *,
        prefill_tokens: int,
        overlap: Overlap,
    ) -> None:
        """`prefill_tokens`: budget of a round for prompt tokens, for each worker."""
        self.counters = Counters()
        self.target, self._workers = workers.target, workers
        self._pool, self._drafting, self._in_flight, self._traces = pool, drafting, in_flight, traces
        self._prefill_tokens, self._overlap = prefill_tokens, overlap
        self._target_free, self._draft_free = asyncio.Lock(), asyncio.Lock()
        self._round_ids = count(1)
        self._measured_times = self.target.step_times
        self._plain_times = copy.deepcopy(self._measured_times)
        """Seconds of rounds without sampling, rules and log-probabilities by rows, learned from the target's times."""
        self._ended = 0.0
        """When the last round ended."""

    @property
    def pipeline_depth(self) -> int:
        """Maximum number of groups in flight."""
        pays = self._can_overlap and self._drafting.overlap_pays(self._pool.schedulable)
        return MAX_PIPELINE_DEPTH if pays else 1

    @property
    def _can_overlap(self) -> bool:
        """Whether both workers can run at the same time without slowing each other down."""
        draft = self._workers.ready_draft
        if draft is None or self._overlap == "off":
            return False
        return self._overlap == "on" or not self._shares_devices

    @property
    def _shares_devices(self) -> bool:
        draft = self._workers.ready_draft
        return draft is not None and not draft.hosts_and_devices.isdisjoint(self.target.hosts_and_devices)

    @property
    def _batch(self) -> int | None:
        """Sequences of both groups if two overlap."""
        return self._pool.schedulable if self.pipeline_depth > 1 else None

    async def run(self, group: Group) -> bool:
        """Run one round. Return False if no sequence made progress.

        Raises WorkerUnreachableError or WorkerRefusedError of the target worker. Nothing is then committed.
        """
        with self._traces.round(group) as trace:
            return await self._run(group, trace)

    async def release(self, sequence_ids: set[int]) -> None:
        """Free the slots of sequences that have left. Return once the target worker has confirmed."""
        self._drafting.forget(sequence_ids)
        if self._workers.draft is not None:
            self._workers.draft.release_soon(sequence_ids)
        while not await self.target.release(sequence_ids):  # noqa: ASYNC110 - polls a remote worker
            await asyncio.sleep(RETRY_SECONDS)

    async def _run(self, group: Group, trace: RoundTrace) -> bool:
        began, instance_id = time.perf_counter(), self.target.instance_id
        same_length = group.same_length
        round_ = self._begin(group)
        outcome = RoundOutcome([], Timed(), [], is_quiet=self.pipeline_depth == 1 or not self._shares_devices)
        proposed = await self._propose(round_, outcome, trace)
        outcome.verify_items = items = round_.verify_items()
        if not items:
            return False
        progressed = await self._verify(round_, items, outcome, trace, instance_id)
        self._drafting.observe_round(outcome)
        for commit in outcome.commits:
            self.counters.add_commit(commit)
        self._in_flight.committed(outcome.commits)
        trace.committed(round_.round_id, outcome.commits, round_.cache_misses)
        self.counters.rounds += 1
        self.counters.cache_misses += round_.cache_misses
        self.counters.grouping.add(group, same_length)
        self.counters.add_times(proposed, outcome.verified, time.perf_counter() - began)
        seconds = self._add_round_time(group, items, began)
        self._drafting.observe_seconds(outcome, seconds, self._batch)
        return progressed

    def _add_round_time(self, group: Group, items: list[VerifyItem], began: float) -> float:
        """Count the time of a round by client and return it. Learn how long rounds without costly rows take."""
        if self._measured_times is not self.target.step_times:  # a new worker
            self._measured_times, self._plain_times = self.target.step_times, copy.deepcopy(self.target.step_times)
        sequences = {sequence.sequence_id: sequence for sequence in group.sequences}
        parts: dict[str, Part] = {}
        for item in items:
            request, rows = sequences[item.sequence_id].request, len(item.token_ids) + len(item.draft_token_ids)
            part = parts.setdefault(request.client, Part())
            part.rows += rows
            part.costly_rows += rows * request.is_costly
        # Groups may overlap. Each counts the time since the last one ended.
        ended = time.perf_counter()
        seconds, self._ended = ended - max(began, self._ended), ended
        self._pool.add_round_time(parts, seconds, self._plain_times)
        if not any(part.costly_rows for part in parts.values()):
            self._plain_times.observe(sum(part.rows for part in parts.values()), seconds)
        return seconds

    def _begin(self, group: Group) -> Round:
        round_id, draft = next(self._round_ids), self._workers.ready_draft
        worker = DraftWorker(draft.max_model_len, round_id, draft.step_times) if draft is not None else None
        plans = self._drafting.plan_round(group.sequences, worker, self.target.step_times, self._batch)
        chance, pass_seconds = self._drafting.chance, self.target.step_times
        return Round(round_id, group.sequences, self._prefill_tokens, plans, chance, pass_seconds)

    async def _propose(self, round_: Round, outcome: RoundOutcome, trace: RoundTrace) -> Timed:
        draft = self._workers.ready_draft
        if draft is None:
            return Timed()
        items = round_.propose_items(draft.max_model_len, draft.vocab_size, draft.kv_reservations_grow)
        if not items:
            return Timed()
        began, outcome.called_draft = time.perf_counter(), True
        with _draft_failures_ignored("proposal failed; decoding plainly"):
            proposals, timed = await self._call_draft(draft, round_.round_id, items, trace)
            round_.take_proposals(proposals, self.target.vocab_size)
            outcome.proposals.append((items, proposals, timed))
            return timed
        return Timed(elapsed=time.perf_counter() - began)

    async def _verify(
        self, round_: Round, items: list[VerifyItem], outcome: RoundOutcome, trace: RoundTrace, instance_id: str
    ) -> bool:
        """Verify and commit. Meanwhile an idle draft worker drafts ahead. Return whether any sequence had a slot.

        `instance_id`: the target process whose caches the round assumes.
        """
        drafting_ahead: asyncio.Task[None] | None = None
        if self._can_overlap and self.pipeline_depth == 1:
            drafting_ahead = asyncio.create_task(self._draft_ahead(round_, items, outcome, trace))
        try:
            async with self._target_free:
                self._check_process(instance_id)
                with trace.calling("verify", round_.round_id) as parent:
                    verdicts, outcome.verified = await self.target.verify(round_.round_id, items, parent)
        except BaseException:
            if drafting_ahead is not None:
                drafting_ahead.cancel()
            raise
        if drafting_ahead is not None:
            await drafting_ahead
            self._check_process(instance_id)
        outcome.commits = round_.commit(verdicts)
        return any(verdict.status is not ItemStatus.NO_SLOT for verdict in verdicts)

    def _check_process(self, instance_id: str) -> None:
        """Raise WorkerUnreachableError if another target process has taken over."""
        if self.target.instance_id != instance_id:
            raise WorkerUnreachableError("another target process took over", Cause.NOT_SENT)

    async def _draft_ahead(
        self, round_: Round, verify_items: list[VerifyItem], outcome: RoundOutcome, trace: RoundTrace
    ) -> None:
        """Draft tokens that follow the proposals, assuming that the target accepts all of them."""
        draft = self._workers.draft
        assert draft is not None
        items = round_.ahead_items(self._drafting.num_ahead_steps(verify_items), draft.max_model_len)
        if not items:
            return
        outcome.called_draft, outcome.is_quiet = True, outcome.is_quiet and not self._shares_devices
        with _draft_failures_ignored("discarding draft-ahead tokens"):
            proposals, timed = await self._call_draft(draft, next(self._round_ids), items, trace)
            round_.take_ahead(proposals, self.target.vocab_size)
            outcome.proposals.append((items, proposals, timed))
            self.counters.stage_seconds["draft"] += timed.forward

    async def _call_draft(
        self, draft: Draft, round_id: int, items: list[ProposeItem], trace: RoundTrace
    ) -> tuple[list[Proposal], Timed]:
        async with self._draft_free:
            with trace.calling("propose", round_id) as parent:
                return await draft.propose(round_id, items, *self._drafting.hints, parent)


@contextmanager
def _draft_failures_ignored(consequence: str) -> Iterator[None]:
    """Log and ignore errors of the draft worker, which must never fail a request."""
    try:
        yield
    except (WorkerUnreachableError, WorkerRefusedError):
        pass  # logged by the link
    except Exception:
        log.exception(consequence)
