"""Failures of rounds and of the target worker: which requests end, and which continue.

An internal error fails only the requests involved. A request that keeps failing on the target worker runs alone, and
then fails.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable

from coordinator.rounds.running import Releasing, Shared
from coordinator.scheduling.grouping import Group
from coordinator.scheduling.sequence import Sequence
from coordinator.scheduling.window import Window
from coordinator.workers.interface import Cause, Target, WorkerRefusedError, WorkerUnreachableError
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

RunRound = Callable[[Group, bool], Awaitable[bool]]
"""Runs the round of a group, which may join the last one. Returns False if no sequence made progress."""


class Failures:
    """Handles the errors of one target worker's rounds."""

    def __init__(self, shared: Shared, window: Window, target: Target, releasing: Releasing) -> None:
        self._queue, self._in_flight, self._counters = shared.queue, shared.in_flight, shared.counters
        self._window, self._target, self._releasing = window, target, releasing
        self._lost_rounds: list[tuple[str, Group, str]] = []
        """Rounds during which a target worker was lost: (instance id, group, reason). It may not be back yet."""
        self._blamed_rounds: list[tuple[str, Group]] = []
        """Rounds that were blamed before the lost target worker was back: (instance id, group)."""

    # --- Rounds

    async def guard(self, run: RunRound, group: Group, may_join: bool) -> bool:
        """Run the round of a group and handle every error. Return False if an immediate retry may fail again."""
        instance_id = self._target.instance_id
        try:
            progressed = await self._run_or_split(run, group, may_join)
            for sequence in group.sequences:
                sequence.blame.clear(sequence.progress)
                self._fail_if_poisonous(sequence)
                self._fail_if_without_grammar(sequence)
            return progressed
        except WorkerUnreachableError as error:  # nothing is lost; the loop waits for the target
            if error.cause is Cause.FAILED:
                self._blame(group, str(error))
            elif error.cause is Cause.LOST:
                self._lost_rounds.append((instance_id, group, str(error)))
        except Exception:  # a bug here must fail these requests, not the service
            log.exception("round failed")
            for sequence in group.sequences:
                self._fail(sequence, WorkerFailedError("internal error in a round"))
        return True

    async def _run_or_split(self, run: RunRound, group: Group, may_join: bool) -> bool:
        """Run a round. If the target refuses it, run each sequence alone and fail the ones refused again.

        Raises WorkerUnreachableError instead of failing a sequence if the target fails every round.
        """
        try:
            return await run(group, may_join)
        except WorkerRefusedError:
            for sequence in self._window.hold(group.sequences):
                instance_id = self._target.instance_id
                try:
                    await run(Group([sequence]), False)
                except WorkerRefusedError as error:
                    await self._target.check_rounds(instance_id)
                    self._fail(sequence, WorkerFailedError(f"the target worker refused the sequence twice: {error}"))
            return True

    def fail_selection(self, sequences: list[Sequence]) -> bool:
        """Fail these sequences after an error in group selection. Return False if there are none."""
        if not sequences:
            return False
        extra = logs.about(*request_ids(sequences))
        log.exception("group selection failed; failing %d sequences", len(sequences), extra=extra)
        self._counters.grouping_errors += 1
        for sequence in sequences:
            self._fail(sequence, WorkerFailedError("internal error in group selection"))
        self._window.wake()
        return True

    # --- Blame

    def blame_for_restart(self) -> None:
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
            self._window.wake()

    def _fail_if_without_grammar(self, sequence: Sequence) -> None:
        """Fail a sequence if its grammar failed, or is never ready."""
        field = sequence.request.constraint
        if sequence.grammar_error is not None:
            reason = f"failed after {sequence.num_generated} tokens: {shortened(sequence.grammar_error)}"
            self._fail(sequence, InvalidArgumentError(field, reason))
        elif sequence.grammar_waits >= MAX_GRAMMAR_WAITS:
            reason = f"the target worker has not been ready for it in {MAX_GRAMMAR_WAITS} rounds"
            self._fail(sequence, UnavailableError(f"{field}: {reason}"))

    # --- The target worker

    def target_replaced(self) -> None:
        """Forget the caches of the previous target process.

        Fail constrained requests if no target worker follows grammars any more.
        """
        refusal = self._target.grammar_refusal
        self._window.follows_grammars = refusal is None
        if refusal is not None:
            self._fail_without_grammars(refusal)
        self._window.forget_target_caches()
        self._queue.wake()

    def vacate(self) -> None:
        """If the target worker is lost, let its sequences continue on others. Blame the rounds that it lost."""
        if not self._window.is_lost or not self._queue.has_open_window:
            return
        for instance_id, group, reason in self._lost_rounds:  # they may have crashed it, and must not crash all others
            self._blame(group, reason)
            self._blamed_rounds.append((instance_id, group))
        self._lost_rounds.clear()
        if moved := self._queue.vacate(self._window):
            log.warning("target worker lost; %d sequences continue on other target workers", len(moved))
            self._releasing.abandon(moved)
            self._queue.wake()
        if self._window.is_standby and not self._window.open_rounds and self._window in self._queue.windows:
            self._releasing.abandon(self._window.leaving | {sequence.sequence_id for sequence in self._window.members})
            self.target_removed()

    def target_removed(self) -> None:
        """Queue the window's sequences for other windows. Its rounds have stopped."""
        self._queue.remove(self._window)
        if self._queue.has_open_window:
            self._fail_without_grammars("no other target worker follows grammars")
        self._queue.wake()

    def _fail_without_grammars(self, refusal: str) -> None:
        for sequence in self._queue.without_grammars(self._window):
            self._fail(sequence, UnimplementedError(f"{sequence.request.constraint}: {refusal}"))

    def _fail(self, sequence: Sequence, error: ServiceError) -> None:
        """End a sequence with an error, unless it has finished."""
        if sequence.finish is None:
            self._queue.abort(sequence)
            self._in_flight.failed(sequence, error)


def request_ids(sequences: Iterable[Sequence]) -> list[str]:
    return [sequence.request.request_id for sequence in sequences]
