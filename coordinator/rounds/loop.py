"""The round loop: choose a group, run its round with the workers, publish the commits, repeat.

The loop waits while the target worker is unavailable. An internal error fails only the requests involved. A request
that keeps failing on the target worker runs alone, and then fails.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from coordinator.requests.in_flight import RequestsInFlight
from coordinator.rounds.runner import MAX_ROUNDS_WITH_NEWCOMERS, RETRY_SECONDS, RoundRunner
from coordinator.scheduling.grouping import Group, Policy
from coordinator.scheduling.pool import Pool
from coordinator.scheduling.ready import ReadySet
from coordinator.scheduling.sequence import Sequence
from coordinator.workers.errors import Cause, WorkerRefusedError, WorkerUnreachableError
from coordinator.workers.link import shortened
from specpool.protocol.errors import (
    InvalidArgumentError,
    ServiceError,
    UnavailableError,
    UnimplementedError,
    WorkerFailedError,
)
from specpool.rpc.observability import logs

log = logging.getLogger(__name__)

# Maximum consecutive rounds in which a sequence waits for the target worker to compile its grammar or compute its mask.
MAX_GRAMMAR_WAITS = 6000


class RoundLoop:
    """Keeps as many rounds in flight as the runner allows."""

    def __init__(self, pool: Pool, policy: Policy, runner: RoundRunner, in_flight: RequestsInFlight) -> None:
        self._pool, self._policy, self._runner, self._in_flight = pool, policy, runner, in_flight
        self._target = runner.target
        self.on_admission: Callable[[], None] = lambda: None
        """Called before sequences are admitted."""
        pool.wake, pool.admission_limit = self.wake, self._admission_limit
        self._work = asyncio.Event()
        self._has_leaving = asyncio.Event()
        self._num_running = 0
        """Rounds in flight."""
        self._lost_rounds: list[tuple[str, Group, str]] = []
        """Rounds during which a target worker was lost: (instance id, group, reason). It may not be back yet."""
        self._blamed_rounds: list[tuple[str, Group]] = []
        """Rounds that were blamed before the lost target worker was back: (instance id, group)."""

    def wake(self) -> None:
        """Call after the pool has changed."""
        self._work.set()
        self._has_leaving.set()

    def target_replaced(self, numerics: str) -> None:
        """Forget the caches of the previous target process. `numerics`: see `TargetModel.replace`.

        Unless the new process certainly runs the same model, fail the requests that have tokens: two models must not
        contribute to one response. Fail constrained requests if it cannot follow grammars.
        """
        requests = self._pool.requests
        reason = "another target process took over without fingerprints that prove it runs the same model"
        self._fail_begun(requests.change_numerics(self._pool, numerics), reason)
        refusal = self._target.grammar_refusal
        self._pool.follows_grammars = refusal is None
        if refusal is not None:
            for sequence in requests.without_grammars(self._pool):
                self._fail(sequence, UnimplementedError(f"{sequence.request.constraint}: {refusal}"))
        self._pool.forget_target_caches()
        requests.wake()

    def vacate(self) -> None:
        """If the target worker is lost, let its sequences continue on others. Blame the rounds that it lost."""
        if not self._pool.is_lost or not self._pool.requests.has_open_window:
            return
        for instance_id, group, reason in self._lost_rounds:  # they may have crashed it, and must not crash all others
            self._blame(group, reason)
            self._blamed_rounds.append((instance_id, group))
        self._lost_rounds.clear()
        if moved := self._pool.vacate():
            log.warning("target worker lost; %d sequences continue on other target workers", len(moved))
            self._runner.abandon(moved)
            self._pool.requests.wake()

    def close(self) -> None:
        """Give up the window of a target worker that was removed. The loop no longer runs."""
        begun = self._pool.close()
        self._fail_begun(begun, "the target worker was removed, and no other one is proven to run the same model")
        self._pool.requests.wake()

    def _fail_begun(self, sequences: list[Sequence], reason: str) -> None:
        if sequences:
            extra = logs.about(*_request_ids(sequences))
            log.error("failing %d sequences: %s", len(sequences), reason, extra=extra)
        for sequence in sequences:
            self._fail(sequence, UnavailableError(f"{reason}; send the request again"))

    async def run(self) -> None:
        """Run rounds, and release the slots of sequences that left. Never returns."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._release_slots())
            for _ in range(MAX_ROUNDS_WITH_NEWCOMERS):
                tasks.create_task(self._run_rounds())

    async def _run_rounds(self) -> None:
        while True:
            await self._target.wait_ready()
            self._blame_for_restart()
            self._work.clear()
            runs_next = self._num_running < self._runner.max_rounds
            is_joining = not runs_next and self._num_running == self._runner.max_rounds and self._runner.takes_newcomers
            group = self._next_group(is_joining) if runs_next or is_joining else Group([])
            if group.sequences:
                self._num_running += 1
                with logs.BoundRequests(partial(_request_ids, group.sequences)):
                    await self._run_round(group, is_joining)
            else:
                await self._work.wait()

    def _next_group(self, only_newcomers: bool) -> Group:
        """Admit sequences and begin the round of the next group. `only_newcomers`: choose only new sequences.

        An error fails the sequences that the round would have contained. It propagates only if there are none.
        """
        try:
            self._admit()
        except Exception:
            if not self._fail_selection([*self._pool.members, *self._pool.entering]):
                raise
            return Group([])
        if self._pool.awaits_places:
            return Group([])  # a release takes far less time than the round that would delay it
        try:
            return self._choose(self._pool.newcomers if only_newcomers else self._pool.eligible)
        except Exception:
            if not self._fail_selection(list(self._pool.ready)):
                raise
            return Group([])

    def _admit(self) -> None:
        self.on_admission()
        pool = self._pool
        limit = self._admission_limit() if pool.queued and pool.capacity else 0
        for sequence in pool.admit(limit):
            self._in_flight.admitted(sequence)
        if pool.leaving:  # includes preempted sequences
            self._has_leaving.set()

    def _admission_limit(self) -> int:
        pool = self._pool
        return self._policy.admissible(pool.members, len(pool.leaving), pool.capacity)

    def _choose(self, eligible: ReadySet) -> Group:
        if not eligible:
            return Group([])
        pool = self._pool
        group = self._policy.choose(eligible, pool.rounds)
        max_size = -(-pool.schedulable // self._runner.num_groups)
        group = Group(_without_suspects(group.sequences[:max_size]), group.fallback)
        pool.begin_round(group.sequences)
        return group

    def _fail_selection(self, sequences: list[Sequence]) -> bool:
        """Fail these sequences after an error in group selection. Return False if there are none."""
        if not sequences:
            return False
        extra = logs.about(*_request_ids(sequences))
        log.exception("group selection failed; failing %d sequences", len(sequences), extra=extra)
        self._runner.counters.grouping_errors += 1
        for sequence in sequences:
            self._fail(sequence, WorkerFailedError("internal error in group selection"))
        self.wake()
        return True

    async def _release_slots(self) -> None:
        while True:
            await self._has_leaving.wait()
            self._has_leaving.clear()
            if leaving := self._pool.leaving:
                await self._runner.release(leaving)
                self._pool.released(leaving)
                self._pool.requests.wake()  # preempted sequences may continue anywhere

    async def _run_round(self, group: Group, may_join: bool) -> None:
        """Run the round of a group and handle every error."""
        instance_id = self._target.instance_id
        try:
            progressed = await self._run_or_split(group, may_join)
            for sequence in group.sequences:
                sequence.blame.clear(sequence.progress)
                self._fail_if_poisonous(sequence)
                self._fail_if_without_grammar(sequence)
        except WorkerUnreachableError as error:
            progressed = True  # nothing is lost; the loop waits for the target
            if error.cause is Cause.FAILED:
                self._blame(group, str(error))
            elif error.cause is Cause.LOST:
                self._lost_rounds.append((instance_id, group, str(error)))
        except Exception:  # a bug here must fail these requests, not the service
            log.exception("round failed")
            progressed = True
            for sequence in group.sequences:
                self._fail(sequence, WorkerFailedError("internal error in a round"))
        finally:
            self._pool.end_round(group.sequences)
            self._num_running -= 1
            self._runner.round_ended()
            self.vacate()
            self.wake()
        if not progressed:
            await asyncio.sleep(RETRY_SECONDS)

    def _blame_for_restart(self) -> None:
        """Blame the rounds that crashed the target worker. A lost connection alone blames no request."""
        lost, self._lost_rounds = self._lost_rounds, []
        for instance_id, group, reason in lost:
            has_ended = self._target.has_ended(instance_id)
            if has_ended is None:
                self._lost_rounds.append((instance_id, group, reason))
            elif has_ended:
                self._blame(group, reason)
        for instance_id, group in self._blamed_rounds:
            if not self._target.has_ended(instance_id):
                for sequence in group.sequences:
                    sequence.blame.forgive()
        self._blamed_rounds.clear()

    def _blame(self, group: Group, reason: str) -> None:
        for sequence in group.sequences:
            sequence.blame.record_failure(sequence.progress)
            if sequence.request.is_background:
                self._fail(sequence, UnavailableError(reason))
            self._fail_if_poisonous(sequence, reason)

    def _fail_if_poisonous(self, sequence: Sequence, reason: str = "") -> None:
        if (why := sequence.blame.reason_to_fail) is not None:
            request_id = sequence.request.request_id
            log.error("failing request %r: %s %s", request_id, why, reason, extra=logs.about(request_id))
            self._fail(sequence, WorkerFailedError(f"{why}{reason and f': {reason}'}"))
            self.wake()

    def _fail_if_without_grammar(self, sequence: Sequence) -> None:
        """Fail a sequence if its grammar failed, or is never ready."""
        field = sequence.request.constraint
        if sequence.grammar_error is not None:
            reason = f"failed after {sequence.num_generated} tokens: {shortened(sequence.grammar_error)}"
            self._fail(sequence, InvalidArgumentError(field, reason))
        elif sequence.grammar_waits >= MAX_GRAMMAR_WAITS:
            reason = f"the target worker has not been ready for it in {MAX_GRAMMAR_WAITS} rounds"
            self._fail(sequence, UnavailableError(f"{field}: {reason}"))

    async def _run_or_split(self, group: Group, may_join: bool) -> bool:
        """Run a round. If the target refuses it, run each sequence alone and fail the ones refused again.

        Raises WorkerUnreachableError instead of failing a sequence if the target fails every round.
        """
        try:
            return await self._runner.run(group, self._work.set, may_join)
        except WorkerRefusedError:
            for sequence in self._pool.hold(group.sequences):
                instance_id = self._target.instance_id
                try:
                    await self._runner.run(Group([sequence]), self._work.set)
                except WorkerRefusedError as error:
                    await self._target.check_rounds(instance_id)
                    self._fail(sequence, WorkerFailedError(f"the target worker refused the sequence twice: {error}"))
            return True

    def _fail(self, sequence: Sequence, error: ServiceError) -> None:
        """End a sequence with an error, unless it has finished."""
        if sequence.finish is None:
            self._pool.abort(sequence)
            self._in_flight.failed(sequence, error)


def _request_ids(sequences: list[Sequence]) -> list[str]:
    return [sequence.request.request_id for sequence in sequences]


def _without_suspects(sequences: list[Sequence]) -> list[Sequence]:
    """Drop suspects from a group. If the first sequence is a suspect, it runs alone."""
    if not sequences or sequences[0].blame.is_suspect:
        return sequences[:1]
    return [sequence for sequence in sequences if not sequence.blame.is_suspect]
