"""The round loop: choose a group, run its round with the workers, publish what was committed; again, for ever.

A target worker that is gone makes the loop wait. A fault of the coordinator ends the requests it happened to. A request
with which the target worker fails again and again is run alone, and then given up.
"""

import asyncio
import logging
from functools import partial

from coordinator.drafting.drafting import Drafting
from coordinator.rounds.runner import MOST_LANES, RoundEvents, RoundRunner, RoundSettings
from coordinator.scheduling.counters import Counters
from coordinator.scheduling.grouping import Group, Policy
from coordinator.scheduling.pool import Pool
from coordinator.scheduling.sequence import Sequence
from coordinator.tracing.traces import UNTRACED, Traces
from coordinator.workers.errors import Cause, WorkerRefusedError, WorkerUnreachableError
from coordinator.workers.interface import Workers
from specpool.rpc.observability import logs

log = logging.getLogger(__name__)

# Pause before a round that gained nothing is tried again, and before a failed release is.
RETRY_SECONDS = 0.05


class RoundLoop:
    """Runs one group at a time, or two where one can be drafted for while the other is verified.

    While they are in flight, newcomers queue and leavers are marked.
    """

    def __init__(
        self,
        *,
        pool: Pool,
        policy: Policy,
        workers: Workers,
        drafting: Drafting,
        settings: RoundSettings,
        events: RoundEvents,
        traces: Traces = UNTRACED,
    ) -> None:
        self._pool, self._policy, self._workers = pool, policy, workers
        self._drafting, self._events = drafting, events
        self._runner = RoundRunner(
            pool=pool, workers=workers, drafting=drafting, settings=settings, events=events, traces=traces
        )
        self._work = asyncio.Event()
        self._leavers = asyncio.Event()
        self._lost_rounds: list[tuple[str, Group, str]] = []
        """Rounds during which the target worker was lost: its process, the group, and the reason."""

    @property
    def counters(self) -> Counters:
        """Sums over all rounds."""
        return self._runner.counters

    def wake(self) -> None:
        """Call when something was submitted to the pool or aborted in it."""
        self._work.set()
        self._leavers.set()

    async def run(self) -> None:
        """Runs rounds for ever."""
        async with asyncio.TaskGroup() as lanes:
            for lane in range(MOST_LANES):
                lanes.create_task(self._run_rounds(lane))

    async def _run_rounds(self, lane: int) -> None:
        while True:
            await self._workers.target.wait_ready()
            self._blame_for_restart()
            self._work.clear()
            group = self._next_group() if lane < self._runner.lanes else Group([])
            if group.sequences:
                with logs.BoundRequests(partial(_request_ids, group.sequences)):
                    await self._run_round(group)
            else:
                await self._work.wait()

    def _next_group(self) -> Group:
        """Admits newcomers and chooses the group of the next round, which the pool takes as begun.

        A fault in this ends the sequences that would have been in the round; it is raised only if there is none to end.
        """
        try:
            self._admit()
        except Exception:
            if not self._give_up([*self._pool.members, *self._pool.entering]):
                raise
            return Group([])
        try:
            return self._choose()
        except Exception:
            if not self._give_up(list(self._pool.ready)):
                raise
            return Group([])

    def _admit(self) -> None:
        pool = self._pool
        most = 0
        if pool.queued and pool.capacity:
            most = self._policy.admissible(pool.members, len(pool.leaving), pool.capacity)
        for sequence in pool.admit(most):
            self._events.admitted(sequence)
        if pool.leaving:  # also sequences that were set aside
            self._leavers.set()

    def _choose(self) -> Group:
        pool = self._pool
        if not pool.ready:
            return Group([])
        group = self._policy.choose(pool.ready, pool.rounds)
        most = -(-pool.schedulable // self._runner.lanes)
        group = Group(_without_suspects(group.sequences[:most]), group.fallback)
        pool.begin_round(group.sequences)
        return group

    def _give_up(self, sequences: list[Sequence]) -> bool:
        """Ends sequences for which no group could be chosen. False if there are none."""
        if not sequences:
            return False
        involved = logs.about(*_request_ids(sequences))
        log.exception("choosing a group failed; %d sequences are given up", len(sequences), extra=involved)
        self.counters.grouping_errors += 1
        for sequence in sequences:
            self._fail(sequence, "internal error while a group was chosen")
        self.wake()
        return True

    async def release_leavers(self) -> None:
        """Runs for ever: frees the slots of sequences that left, so that others may enter the window."""
        while True:
            await self._leavers.wait()
            self._leavers.clear()
            if not (leaving := self._pool.leaving):
                continue
            self._drafting.forget(leaving)
            if self._workers.draft is not None:
                self._workers.draft.release_soon(leaving)
            while not await self._workers.target.release(leaving):  # noqa: ASYNC110 - it answers by itself when it can
                await asyncio.sleep(RETRY_SECONDS)
            self._pool.released(leaving)
            self._work.set()

    async def _run_round(self, group: Group) -> None:
        """Runs the round of a group, whatever happens in it."""
        instance_id = self._workers.target.instance_id
        try:
            gained = await self._run_or_split(group)
            self._clear(group)
        except WorkerUnreachableError as error:
            gained = True  # nothing is lost; the loop waits until the target is back
            if error.cause is Cause.FAILED:
                self._blame(group, str(error))
            elif error.cause is Cause.LOST:
                self._lost_rounds.append((instance_id, group, str(error)))
        except Exception:  # a fault of ours must end these requests, not the service
            log.exception("a round failed")
            gained = True
            for sequence in group.sequences:
                self._fail(sequence, "internal error in a round")
        finally:
            self._pool.end_round(group.sequences)
            self._work.set()  # another lane may run them next
            self._leavers.set()
        if not gained:
            await asyncio.sleep(RETRY_SECONDS)

    def _blame_for_restart(self) -> None:
        """Blames the rounds that killed the target worker; a connection that was cut is nobody's fault."""
        while self._lost_rounds:
            instance_id, group, reason = self._lost_rounds.pop()
            if instance_id != self._workers.target.instance_id:
                self._blame(group, reason)

    def _blame(self, group: Group, reason: str) -> None:
        for sequence in group.sequences:
            sequence.suspicion.failed(sequence.progress)
            self._judge(sequence, reason)

    def _clear(self, group: Group) -> None:
        for sequence in group.sequences:
            sequence.suspicion.clear(sequence.progress)
            self._judge(sequence)

    def _judge(self, sequence: Sequence, reason: str = "") -> None:
        """Ends the sequence if it is to be given up."""
        if (verdict := sequence.suspicion.verdict) is not None:
            request_id = sequence.request.request_id
            log.error("%r: %s %s", request_id, verdict, reason, extra=logs.about(request_id))
            self._fail(sequence, f"{verdict}{reason and f': {reason}'}")
            self.wake()

    async def _run_or_split(self, group: Group) -> bool:
        """Runs a round of the group. If the target refuses it, runs one of each sequence alone, to find the sequences
        that the target cannot serve."""
        try:
            return await self._runner.run(group)
        except WorkerRefusedError:
            for sequence in group.sequences:
                try:
                    await self._runner.run(Group([sequence]))
                except WorkerRefusedError as error:
                    self._fail(sequence, f"the target worker refused the sequence twice: {error}")
            return True

    def _fail(self, sequence: Sequence, reason: str) -> None:
        """Ends a sequence with an error, unless it has finished."""
        if sequence.finish is None:
            self._pool.abort(sequence)
            self._events.failed(sequence, reason)


def _request_ids(sequences: list[Sequence]) -> list[str]:
    return [sequence.request.request_id for sequence in sequences]


def _without_suspects(sequences: list[Sequence]) -> list[Sequence]:
    """The group without its suspects, or only its first sequence if that is a suspect: suspects run alone, once they
    have waited longest."""
    if not sequences or sequences[0].suspicion.is_suspect:
        return sequences[:1]
    return [sequence for sequence in sequences if not sequence.suspicion.is_suspect]
