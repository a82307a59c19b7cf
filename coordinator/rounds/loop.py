"""The story of a round: choose a group, propose, verify, commit, publish; and again.

The loop waits while the target worker is unavailable. `failures.py` handles errors, and `proposing.py` the draft side.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from coordinator.rounds.failures import Failures, request_ids
from coordinator.rounds.proposing import MAX_ROUNDS_WITH_NEWCOMERS, Proposing
from coordinator.rounds.running import RETRY_SECONDS, Durations, Releasing, RunningRound, Shared
from coordinator.scheduling.admission import Admission
from coordinator.scheduling.grouping import POLICIES, Group, GroupingLimits, ReadySet
from coordinator.scheduling.sequence import Sequence
from coordinator.scheduling.window import Window
from coordinator.workers.interface import Cause, Workers, WorkerUnreachableError
from specpool.drafting.drafting import Drafting
from specpool.protocol.rounds import ItemStatus, Verdict
from specpool.rpc.observability import logs

UNSERVED = (ItemStatus.NO_SLOT, ItemStatus.GRAMMAR_NOT_READY)
"""Statuses of sequences without progress. An immediate retry may fail again."""


class RoundLoop:
    """Runs the rounds of a window, as many at a time as `Proposing` allows."""

    def __init__(self, shared: Shared, window: Window, workers: Workers, drafting: Drafting) -> None:
        self._shared, self._window, self._target, self._drafting = shared, window, workers.target, drafting
        self._queue, self._in_flight, self._counters = shared.queue, shared.in_flight, shared.counters
        settings = shared.settings
        limits = GroupingLimits(
            settings.max_batch_size, settings.default_group_size, settings.max_wait_rounds, settings.prefer_group
        )
        self._policy = POLICIES[settings.policy](limits)
        self._admission = Admission(shared.queue, window)
        self._releasing = Releasing(workers, drafting)
        self._proposing = Proposing(shared, window, workers, drafting, self._releasing)
        self.failures = Failures(shared, window, workers.target, self._releasing)
        self._durations = Durations(shared.counters, window, workers.target)
        window.wake, window.admission_limit = self._wake, self._admission_limit
        self._work = asyncio.Event()
        self._has_leaving = asyncio.Event()
        self._num_running = 0
        """Rounds in flight."""
        self._last_sent: RunningRound | None = None
        """The last round sent to the target worker, while it is in flight."""

    def _wake(self) -> None:
        """The window has changed."""
        self._work.set()
        self._has_leaving.set()

    async def run(self) -> None:
        """Run rounds, and release the slots of sequences that left. Never returns."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._release_slots())
            for _ in range(MAX_ROUNDS_WITH_NEWCOMERS):
                tasks.create_task(self._run_rounds())

    async def _run_rounds(self) -> None:
        while True:
            await self._target.wait_ready()
            self.failures.blame_for_restart()
            self._work.clear()
            group, may_join = self._next_group()
            if not group.sequences:
                await self._work.wait()
                continue
            with logs.BoundRequests(partial(request_ids, group.sequences)):
                self._num_running += 1
                try:
                    progressed = await self.failures.guard(self._run_round, group, may_join)
                finally:
                    self._end_round(group)
                if not progressed:
                    await asyncio.sleep(RETRY_SECONDS)

    async def _run_round(self, group: Group, may_join: bool) -> bool:
        """Run the round of a group. Return False if no sequence made progress.

        Raises WorkerUnreachableError or WorkerRefusedError of the target worker. Nothing is then committed.
        """
        round_ = self._proposing.plan(group, self._work.set, may_join)
        try:
            with self._shared.traces.round(group) as round_.trace:
                await self._proposing.propose(round_)
                round_.outcome.verify_items = round_.verify_items()
                if not round_.outcome.verify_items:
                    return False
                self._proposing.let_follow(round_)
                with self._in_order(round_) as previous:
                    self._proposing.draft_ahead(round_, previous)
                    verdicts = await self._verify(round_, previous)
                    await self._proposing.wait_for_branches(round_)
                    self._commit(round_, verdicts)
                await asyncio.sleep(0)  # let the next round draft its branches first
                seconds = self._durations.end(round_)
                own_draft_s = round_.outcome.verified.draft
                round_.trace.committed(round_.round_id, round_.outcome.commits, round_.cache_misses, own_draft_s)
                # The next round is sent first, but must not commit first: sequences may end in it.
                asyncio.get_running_loop().call_soon(self._publish, round_, seconds)
                return any(verdict.status not in UNSERVED for verdict in verdicts)
        finally:
            self._proposing.forget(round_)

    # --- Choose

    def _next_group(self) -> tuple[Group, bool]:
        """Admit sequences and begin the round of the next group, if one may run. Return whether it may join the last.

        An error fails the sequences that the round would have contained. It propagates only if there are none.
        """
        window, max_rounds = self._window, self._proposing.max_rounds
        may_join = self._num_running == max_rounds and self._proposing.takes_newcomers
        if window.is_lost or (self._num_running >= max_rounds and not may_join):
            return Group([]), False
        try:
            self._admit()
        except Exception:
            if not self.failures.fail_selection([*window.members, *window.entering]):
                raise
            return Group([]), False
        if window.awaits_places:
            return Group([]), False  # a release takes far less time than the round that would delay it
        try:
            return self._choose(window.newcomers if may_join else window.eligible), may_join
        except Exception:
            if not self.failures.fail_selection(list(window.ready)):
                raise
            return Group([]), False

    def _admit(self) -> None:
        self._shared.on_admission()
        window = self._window
        limit = self._admission_limit() if window.queued and window.capacity else 0
        for sequence in self._admission.admit(limit):
            self._in_flight.admitted(sequence)
        if window.leaving:  # includes preempted sequences
            self._has_leaving.set()

    def _admission_limit(self) -> int:
        window = self._window
        return self._policy.admissible(window.members, len(window.leaving), window.capacity)

    def _choose(self, eligible: ReadySet) -> Group:
        if not eligible:
            return Group([])
        group = self._policy.choose(eligible, self._window.rounds)
        max_size = -(-self._window.schedulable // self._proposing.num_groups)
        group = Group(_without_suspects(group.sequences[:max_size]), group.fallback)
        self._window.begin_round(group.sequences)
        return group

    # --- Verify and commit

    @contextmanager
    def _in_order(self, round_: RunningRound) -> Iterator[RunningRound | None]:
        """The round is in flight until it has committed or failed. Yield the one sent before it, if still in flight."""
        previous, self._last_sent = self._last_sent, round_
        if previous is not None:
            previous.following = round_
        try:
            yield previous
        except BaseException:
            round_.fail()
            raise
        finally:
            round_.committed.set()
            if self._last_sent is round_:
                self._last_sent = None

    async def _verify(self, round_: RunningRound, previous: RunningRound | None) -> list[Verdict]:
        """Send the round, and wait until it and the previous one are answered."""

        async def complete() -> None:
            if previous is not None:
                await previous.committed.wait()

        self._check_process(round_)
        items = list(round_.outcome.verify_items)
        with round_.trace.calling("verify", round_.round_id) as parent:
            verdicts, round_.outcome.verified = await self._target.verify(
                round_.round_id, items, parent, complete, round_.may_join, round_.features, self._drafting.hints
            )
        return verdicts

    def _commit(self, round_: RunningRound, verdicts: list[Verdict]) -> None:
        self._check_process(round_)
        round_.outcome.commits = round_.commit(verdicts)
        self._in_flight.committed(round_.outcome.commits)
        if round_.following is not None:
            round_.following.complete_items()

    def _check_process(self, round_: RunningRound) -> None:
        """Raise WorkerUnreachableError if another target process has taken over."""
        if self._target.instance_id != round_.instance_id:
            raise WorkerUnreachableError("another target process took over", Cause.NOT_SENT)

    # --- Publish and end

    def _publish(self, round_: RunningRound, seconds: float) -> None:
        """Count and learn from a round, then publish its tokens."""
        outcome, counters = round_.outcome, self._counters
        try:
            self._drafting.observe_round(outcome)
            for commit in outcome.commits:
                if not commit.sequence.request.is_background:
                    counters.add_commit(commit)
            counters.rounds += 1
            counters.cache_misses += round_.cache_misses
            counters.grouping.add(round_.group, round_.same_length)
            self._durations.observe(round_, seconds)
            self._drafting.observe_seconds(outcome, seconds, self._proposing.batch)
        finally:
            self._in_flight.publish_soon()
        self._proposing.prepare(self._last_sent)

    def _end_round(self, group: Group) -> None:
        self._window.end_round(group.sequences)
        self._num_running -= 1
        self._proposing.round_ended()
        self.failures.vacate()
        self._wake()

    async def _release_slots(self) -> None:
        while True:
            await self._has_leaving.wait()
            self._has_leaving.clear()
            if leaving := self._window.leaving:
                await self._releasing.release(leaving)
                self._window.released(leaving)
                self._queue.wake()  # preempted sequences may continue anywhere


def _without_suspects(sequences: list[Sequence]) -> list[Sequence]:
    """Drop suspects from a group. If the first sequence is a suspect, it runs alone."""
    if not sequences or sequences[0].blame.is_suspect:
        return sequences[:1]
    return [sequence for sequence in sequences if not sequence.blame.is_suspect]
