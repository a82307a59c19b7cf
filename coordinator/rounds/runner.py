"""Runs rounds with the workers: the draft worker proposes, the target worker verifies.

If the draft worker fails, the round continues without its drafts.
"""

import asyncio
import copy
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from coordinator.config.settings import Overlap
from coordinator.requests.in_flight import RequestsInFlight
from coordinator.scheduling.commits import Commit
from coordinator.scheduling.counters import Counters
from coordinator.scheduling.grouping import Group
from coordinator.scheduling.pool import Pool
from coordinator.scheduling.round import Round
from coordinator.scheduling.sequence import Sequence
from coordinator.scheduling.turn import DraftLimits
from coordinator.scheduling.worker_time import Part
from coordinator.tracing.traces import RoundTrace, Traces
from coordinator.workers.errors import Cause, WorkerRefusedError, WorkerUnreachableError
from coordinator.workers.interface import Draft, Workers
from specpool.drafting.costs import Timed
from specpool.drafting.drafting import Drafting, DraftWorker
from specpool.drafting.outcome import RoundOutcome
from specpool.drafting.plans import DraftPlan
from specpool.protocol.features import WantedFeatures
from specpool.protocol.rounds import ItemStatus, Proposal, ProposeItem, Verdict

log = logging.getLogger(__name__)

# Maximum rounds in flight: one group drafts while another is verified, or the next round waits at the target worker. A
# round of newcomers may join the waiting one.
MAX_ROUNDS, MAX_ROUNDS_WITH_NEWCOMERS = 2, 3
RETRY_SECONDS = 0.05
UNSERVED = (ItemStatus.NO_SLOT, ItemStatus.GRAMMAR_NOT_READY)
"""Statuses of sequences without progress. An immediate retry may fail again."""
# How long to wait for branches after a verification, relative to its duration.
MAX_LATENESS = 1.0


@dataclass(eq=False)
class Flight:
    """A round in flight."""

    group: Group
    round: Round
    sent: Callable[[], None]
    """Called when the next round may be chosen."""
    may_join: bool
    same_length: bool
    """Whether the sequences had equal lengths when the group was chosen."""
    trace: RoundTrace = field(default_factory=RoundTrace)
    instance_id: str = ""
    """The target process whose caches the round assumes."""
    began: float = 0.0
    proposed: Timed = field(default_factory=Timed)
    outcome: RoundOutcome[Commit] = field(default_factory=lambda: RoundOutcome([], Timed(), []))
    committed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the round has committed or failed."""
    failed: bool = False
    following: "Flight | None" = None
    """The round sent after this one, while this one was in flight."""


class RoundRunner:
    """Runs rounds, two at a time if possible: of two groups that alternate, or of one group that runs ahead."""

    def __init__(
        self,
        pool: Pool,
        workers: Workers,
        drafting: Drafting,
        in_flight: RequestsInFlight,
        traces: Traces,
        counters: Counters,
        *,
        prefill_tokens: int,
        overlap: Overlap,
        runs_ahead: bool = True,
        feature_window: int = 1,
    ) -> None:
        """`prefill_tokens`: budget of a round for prompt tokens, for each worker. `counters`: may be shared.

        `feature_window`: maximum tokens of a prompt whose hidden states go to a draft that reads them.

        `runs_ahead`: whether to send the next round before the response to the last one, if the target worker can.
        """
        self.counters = counters
        self.num_groups = 1
        """Number of groups that alternate, updated with every round."""
        self.target, self._workers = workers.target, workers
        self._pool, self._drafting, self._in_flight, self._traces = pool, drafting, in_flight, traces
        self._prefill_tokens, self._overlap, self._may_run_ahead = prefill_tokens, overlap, runs_ahead
        self._feature_window = feature_window
        self._last_sent: Flight | None = None
        """The last round sent to the target worker, while it is in flight."""
        self._round_ended = asyncio.Event()
        self._drafting_ahead: set[asyncio.Task[None]] = set()
        self._releasing: set[asyncio.Future[Any]] = set()
        self._not_followed: set[Flight] = set()
        """Drafting rounds in flight, until the next round may be sent."""
        self._prepared: tuple[list[tuple[int, int]], dict[int, DraftPlan]] | None = None
        """Draft plans made in advance, with the ids and lengths of their sequences."""
        self._round_ids = count(1)
        self._measured_times = self.target.step_times
        self._plain_times = copy.deepcopy(self._measured_times)
        """Seconds by rows of rounds without costly requests, learned from wall time. Begins with the target's times."""
        self._ended = 0.0
        """When the last round ended."""

    @property
    def max_rounds(self) -> int:
        """Maximum number of rounds in flight.

        A drafting group runs ahead only once it has finished drafting branches. Otherwise, newcomers would permanently
        form a second group.
        """
        if self.num_groups > 1:
            return MAX_ROUNDS
        return MAX_ROUNDS if self._runs_ahead and not self._not_followed else 1

    @property
    def takes_newcomers(self) -> bool:
        """Whether a round of newcomers may join the one that waits at the target worker."""
        return self.max_rounds > 1 and self.num_groups == 1 and self.target.max_rounds_ahead >= MAX_ROUNDS

    @property
    def _runs_ahead(self) -> bool:
        return self._may_run_ahead and self.target.max_rounds_ahead > 0

    @property
    def _selects_branches(self) -> bool:
        return self._runs_ahead and self.target.selects_branches

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
    def _features(self) -> WantedFeatures | None:
        """The hidden states that the draft worker reads."""
        draft = self._workers.ready_draft
        if draft is None or draft.features is None or not self.target.returns_features:
            return None
        return WantedFeatures(draft.features, self._feature_window)

    @property
    def _batch(self) -> int | None:
        """Sequences of both groups if two overlap."""
        return self._pool.schedulable if self.num_groups > 1 else None

    async def run(self, group: Group, sent: Callable[[], None], may_join: bool = False) -> bool:
        """Run one round. Return False if no sequence made progress.

        `sent`: called when the next round may be chosen. `may_join`: whether it may share a pass with the last round.
        Raises WorkerUnreachableError or WorkerRefusedError of the target worker. Nothing is then committed.
        """
        flight = Flight(group, self._plan(group), sent, may_join, group.same_length)
        flight.outcome.is_trial = flight.round.is_trial
        if flight.round.wants_drafts:
            self._not_followed.add(flight)
        try:
            with self._traces.round(group) as flight.trace:
                return await self._run(flight)
        finally:
            self._not_followed.discard(flight)

    def round_ended(self) -> None:
        """Call after a round has ended."""
        self._round_ended.set()
        self._round_ended = asyncio.Event()

    async def release(self, sequence_ids: set[int]) -> None:
        """Free the slots of sequences that have left. Return once the target worker has confirmed."""
        self._drafting.forget(sequence_ids)
        self._releasing.add(releasing := asyncio.create_task(self._release_drafts(sequence_ids)))
        releasing.add_done_callback(self._releasing.discard)
        while not await self.target.release(sequence_ids):  # noqa: ASYNC110 - polls a remote worker
            await asyncio.sleep(RETRY_SECONDS)

    def abandon(self, sequence_ids: set[int]) -> None:
        """Free the slots of sequences that continue on another target worker, as soon as the workers can."""
        self._drafting.forget(sequence_ids)
        for release in (self._release_drafts(sequence_ids), self.target.release(sequence_ids)):
            self._releasing.add(releasing := asyncio.ensure_future(release))
            releasing.add_done_callback(self._releasing.discard)

    async def _release_drafts(self, sequence_ids: set[int]) -> None:
        """Free the slots of the draft worker, after calls in flight that could take them again."""
        if self._drafting_ahead:
            await asyncio.wait(set(self._drafting_ahead))
        if self._workers.draft is not None:
            self._workers.draft.release_soon(sequence_ids)

    def _plan(self, group: Group) -> Round:
        round_id = next(self._round_ids)
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] == _ids_and_lengths(group.sequences):
            plans = prepared[1]
        else:
            plans = self._plan_drafts(group.sequences, round_id)
        chance, pass_seconds = self._drafting.chance, self.target.step_times
        round_ = Round(round_id, group.sequences, self._prefill_tokens, plans, chance, pass_seconds, self._features)
        overlaps = self._can_overlap and not round_.drafts_ahead
        self.num_groups = 1 + (overlaps and self._drafting.overlap_pays(self._pool.schedulable))
        return round_

    def _plan_drafts(self, sequences: list[Sequence], round_id: int) -> dict[int, DraftPlan]:
        draft, worker = self._workers.ready_draft, None
        if draft is not None:
            max_branches = draft.max_branches if self._can_overlap else 0
            can_branch = max_branches, self._selects_branches
            worker = DraftWorker(
                draft.max_model_len, round_id, draft.step_times, *can_branch, draft.features is not None
            )
        return self._drafting.plan_round(sequences, worker, self.target.step_times, self._batch)

    def _prepare(self) -> None:
        """Plan the next round's drafts while branches are drafted, so that it can be sent when they arrive."""
        flight = self._last_sent
        if flight is None or flight not in self._not_followed or not self._selects_branches or self.num_groups > 1:
            return
        sequences = [sequence for sequence in flight.group.sequences if sequence.finish is None]
        if sequences and flight.round.drafts_ahead:
            plans = self._plan_drafts(sequences, flight.round.round_id + 1)
            self._prepared = _ids_and_lengths(sequences), plans

    async def _run(self, flight: Flight) -> bool:
        round_, sequences = flight.round, flight.group.sequences
        while round_.wants_drafts and not round_.drafts_ahead and self._pool.has_other_rounds(sequences):
            await self._round_ended.wait()  # the draft worker needs the tokens that they commit
        flight.began, flight.instance_id = time.perf_counter(), self.target.instance_id
        flight.outcome.is_quiet = self.num_groups == 1 or not self._shares_devices
        await self._propose(flight)
        flight.outcome.verify_items = round_.verify_items()
        if not flight.outcome.verify_items:
            return False
        # A drafting round is followed only once its branches are drafted. Newcomers can join the group until then.
        if self._runs_ahead and self.num_groups == 1 and not round_.wants_drafts:
            self._follow(flight)
        progressed = await self._verify(flight)
        seconds = self._seconds_of_round(flight.began)
        self.counters.add_times(flight.proposed, flight.outcome.verified, seconds)
        flight.trace.committed(round_.round_id, flight.outcome.commits, round_.cache_misses)
        # The next round is sent first, but must not commit first: sequences may end in it.
        asyncio.get_running_loop().call_soon(self._observe, flight, seconds)
        return progressed

    def _follow(self, flight: Flight) -> None:
        """Allow the next round to be sent before the response to this one."""
        self._not_followed.discard(flight)
        self._pool.round_sent(flight.group.sequences)
        flight.sent()

    async def _propose(self, flight: Flight) -> None:
        draft, round_ = self._workers.ready_draft, flight.round
        if round_.drafts_ahead or (self._selects_branches and not round_.wants_drafts):
            round_.take_branches(self._selects_branches)
            return
        if draft is None or not round_.wants_drafts:
            return
        items = round_.propose_items(_limits(draft))
        if not items:
            return
        began, flight.outcome.called_draft = time.perf_counter(), True
        with _draft_failures_ignored("proposal failed; decoding plainly"):
            proposals, timed = await self._call_draft(draft, round_.round_id, items, flight.trace)
            round_.take_proposals(proposals, self.target.vocab_size)
            flight.outcome.proposals.append((items, proposals, timed))
            flight.proposed = timed
            return
        flight.proposed = Timed(elapsed=time.perf_counter() - began)

    async def _verify(self, flight: Flight) -> bool:
        """Verify and commit. Meanwhile the draft worker may draft ahead. Return whether any sequence was served."""
        drafting_ahead: asyncio.Task[None] | None = None
        previous, self._last_sent = self._last_sent, flight
        if previous is not None:
            previous.following = flight
        if flight.round.drafts_ahead:
            drafting_ahead = asyncio.create_task(self._draft_ahead(flight, previous))
            self._drafting_ahead.add(drafting_ahead)
            drafting_ahead.add_done_callback(self._drafting_ahead.discard)
        try:
            verdicts = await self._call_target(flight, previous)
            if drafting_ahead is not None and not drafting_ahead.done():
                await asyncio.wait([drafting_ahead], timeout=MAX_LATENESS * self._usual_seconds(flight.outcome))
            self._check_process(flight.instance_id)
            flight.outcome.commits = flight.round.commit(verdicts)
            self._in_flight.committed(flight.outcome.commits)
            if flight.following is not None:
                flight.following.round.complete_items()
        except BaseException:
            flight.failed = True
            flight.round.discard()
            if drafting_ahead is not None:
                drafting_ahead.cancel()
            raise
        finally:
            flight.committed.set()
            if self._last_sent is flight:
                self._last_sent = None
        await asyncio.sleep(0)  # let the next round draft its branches first
        return any(verdict.status not in UNSERVED for verdict in verdicts)

    def _usual_seconds(self, outcome: RoundOutcome[Commit]) -> float:
        """Seconds of the verification, or its usual duration if longer: `elapsed` is short if it was read late."""
        rows = sum(len(item.token_ids) + len(item.draft_token_ids) for item in outcome.verify_items)
        return max(outcome.verified.elapsed, self.target.step_times(rows))

    async def _call_target(self, flight: Flight, previous: Flight | None) -> list[Verdict]:
        """Send the round, and wait until it and the previous one are answered."""
        round_, outcome = flight.round, flight.outcome

        async def complete() -> None:
            if previous is not None:
                await previous.committed.wait()

        self._check_process(flight.instance_id)
        with flight.trace.calling("verify", round_.round_id) as parent:
            verdicts, outcome.verified = await self.target.verify(
                round_.round_id, list(outcome.verify_items), parent, complete, flight.may_join, round_.features
            )
        return verdicts

    def _check_process(self, instance_id: str) -> None:
        """Raise WorkerUnreachableError if another target process has taken over."""
        if self.target.instance_id != instance_id:
            raise WorkerUnreachableError("another target process took over", Cause.NOT_SENT)

    async def _draft_ahead(self, flight: Flight, previous: Flight | None) -> None:
        """Draft branches for the most probable outcomes of the verification, then let the next round follow."""
        if previous is not None:
            await previous.committed.wait()  # its outcome selects the drafts of this round
            if previous.failed:
                return
        began = time.perf_counter()
        with _draft_failures_ignored("discarding branches"):
            await self._draft_branches(flight)
        if flight.committed.is_set():
            return
        if previous is not None and flight.outcome.proposals:
            flight.outcome.ahead_seconds = time.perf_counter() - began
        if self._selects_branches:
            self._follow(flight)

    async def _draft_branches(self, flight: Flight) -> None:
        draft, round_, outcome = self._workers.ready_draft, flight.round, flight.outcome
        if draft is not None and (items := round_.ahead_items(_limits(draft))):
            outcome.called_draft = outcome.drafted_ahead = True
            outcome.is_quiet = outcome.is_quiet and not self._shares_devices
            proposals, timed = await self._call_draft(draft, next(self._round_ids), items, flight.trace)
            self.counters.stage_seconds["draft"] += timed.forward
            if flight.committed.is_set():  # too late
                self._drafting.observe_proposals(items, proposals, timed)
                return
            round_.take_ahead(proposals, self.target.vocab_size)
            outcome.proposals.append((items, proposals, timed))

    async def _call_draft(
        self, draft: Draft, round_id: int, items: list[ProposeItem], trace: RoundTrace
    ) -> tuple[list[Proposal], Timed]:
        with trace.calling("propose", round_id) as parent:
            return await draft.propose(round_id, items, *self._drafting.hints, parent)

    def _seconds_of_round(self, began: float) -> float:
        """The seconds of a round that ends now. Rounds may overlap: each counts the time since the last one ended."""
        ended = time.perf_counter()
        seconds, self._ended = ended - max(began, self._ended), ended
        return seconds

    def _observe(self, flight: Flight, seconds: float) -> None:
        """Count and learn from a round, then publish its tokens."""
        commits = flight.outcome.commits
        try:
            self._drafting.observe_round(flight.outcome)
            for commit in commits:
                if not commit.sequence.request.is_background:
                    self.counters.add_commit(commit)
            self.counters.rounds += 1
            self.counters.cache_misses += flight.round.cache_misses
            self.counters.grouping.add(flight.group, flight.same_length)
            self._add_round_time(flight, seconds)
            self._drafting.observe_seconds(flight.outcome, seconds, self._batch)
        finally:
            self._in_flight.publish_soon()
        self._prepare()

    def _add_round_time(self, flight: Flight, seconds: float) -> None:
        """Count the time of a round by client. Learn how long rounds without costly rows take."""
        if self._measured_times is not self.target.step_times:  # a new worker
            self._measured_times, self._plain_times = self.target.step_times, copy.deepcopy(self.target.step_times)
        sequences = {sequence.sequence_id: sequence for sequence in flight.group.sequences}
        parts: dict[str, Part] = {}
        for sequence_id, rows in flight.outcome.rows.items():
            request = sequences[sequence_id].request
            part = parts.setdefault(request.client, Part())
            part.rows += rows
            part.costly_rows += rows * request.is_costly
        self._pool.add_round_time(parts, seconds, self._plain_times)
        if not any(part.costly_rows for part in parts.values()):
            self._plain_times.observe(sum(part.rows for part in parts.values()), seconds)


def _ids_and_lengths(sequences: list[Sequence]) -> list[tuple[int, int]]:
    return [(sequence.sequence_id, len(sequence.token_ids)) for sequence in sequences]


def _limits(draft: Draft) -> DraftLimits:
    numbers = draft.max_model_len, draft.vocab_size, draft.kv_reservations_grow, draft.max_branches
    return DraftLimits(*numbers, draft.features)


@contextmanager
def _draft_failures_ignored(consequence: str) -> Iterator[None]:
    """Log and ignore errors of the draft worker, which must never fail a request."""
    try:
        yield
    except (WorkerUnreachableError, WorkerRefusedError):
        pass  # logged by the link
    except Exception:
        log.exception(consequence)
