"""The round loop: choose a group, play its round with the workers, publish what was committed; again, for ever.

A draft worker that fails costs its drafts; the round goes on without. A target worker that is gone makes the loop wait.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from itertools import count
from typing import Protocol

from coordinator.counters import Counters, Timed
from coordinator.drafting.costs import StepTimes
from coordinator.drafting.drafting import Drafting, DraftWorker
from coordinator.scheduling.commits import Commit
from coordinator.scheduling.grouping import Group, Policy
from coordinator.scheduling.pool import Pool
from coordinator.scheduling.round import Round
from coordinator.scheduling.sequence import Sequence
from coordinator.settings import Overlap
from coordinator.workers.link import WorkerRefusedError, WorkerUnreachableError
from protocol.rounds import ItemStatus, Proposal, ProposeItem, Verdict, VerifyItem

log = logging.getLogger(__name__)

# Groups in flight at a time, at most: one that is drafted for and one that is verified.
LANES = 2
# Pause before a round that gained nothing is tried again, and before a failed release is.
RETRY_SECONDS = 0.05


class Target(Protocol):
    """What the loop needs of the target worker; `coordinator.workers.target_link.TargetLink` is one."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def step_times(self) -> StepTimes: ...
    @property
    def place(self) -> str: ...
    async def wait_ready(self) -> None: ...
    async def verify(self, round_id: int, items: list[VerifyItem]) -> tuple[list[Verdict], Timed]: ...
    async def release(self, sequence_ids: set[int]) -> bool: ...


class Draft(Protocol):
    """What the loop needs of the draft worker; `coordinator.workers.draft_link.DraftLink` is one."""

    @property
    def is_ready(self) -> bool: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def step_times(self) -> StepTimes: ...
    @property
    def place(self) -> str: ...
    async def propose(
        self, round_id: int, items: list[ProposeItem], chances: Iterable[float], step_cost: float
    ) -> tuple[list[Proposal], Timed]: ...
    async def release(self, sequence_ids: set[int]) -> bool: ...


class RoundLoop:
    """One group at a time, or two where one can be drafted for while the other is verified.

    While they are in flight, newcomers queue and leavers are marked.
    """

    def __init__(
        self,
        pool: Pool,
        policy: Policy,
        target: Target,
        draft: Draft | None,
        prefill_tokens: int,
        drafting: Drafting,
        overlap: Overlap,
        publish: Callable[[Commit], None],
        admitted: Callable[[Sequence], None],
        fail: Callable[[Sequence, str], None],
    ) -> None:
        """`publish` gets every commit, `admitted` every newcomer of the window, `fail` every sequence given up on."""
        self.counters = Counters()
        self._pool, self._policy, self._target, self._draft = pool, policy, target, draft
        self._prefill_tokens, self._drafting, self._overlap = prefill_tokens, drafting, overlap
        self._target_free, self._draft_free = asyncio.Lock(), asyncio.Lock()
        self._publish, self._admitted, self._fail = publish, admitted, fail
        self._round_ids = count(1)
        self._work = asyncio.Event()
        self._leavers = asyncio.Event()

    def wake(self) -> None:
        """Call when something was submitted to the pool or aborted in it."""
        self._work.set()
        self._leavers.set()

    async def run(self) -> None:
        """Plays rounds for ever."""
        async with asyncio.TaskGroup() as lanes:
            for lane in range(LANES):
                lanes.create_task(self._play_rounds(lane))

    async def _play_rounds(self, lane: int) -> None:
        while True:
            await self._target.wait_ready()
            group = self._next_group() if lane < self._lanes else Group([])
            if group.sequences:
                await self._play_safely(group)
            else:
                self._work.clear()
                await self._work.wait()

    def _next_group(self) -> Group:
        pool = self._pool
        for sequence in pool.admit(self._policy.places(pool.members, len(pool.leaving), pool.room)):
            self._admitted(sequence)
        group = self._policy.choose(pool.ready, pool.rounds)
        most = -(-pool.playing // self._lanes)
        return Group(group.sequences[:most], group.fallback)

    @property
    def _lanes(self) -> int:
        """Groups that may be in flight at a time."""
        return LANES if self._are_separate and self._drafting.halves_pay(self._pool.playing) else 1

    @property
    def _are_separate(self) -> bool:
        """Whether both workers can be busy at the same time without taking it from each other."""
        if self._draft is None or not self._draft.is_ready or self._overlap == "off":
            return False
        return self._overlap == "on" or self._draft.place != self._target.place

    async def release_leavers(self) -> None:
        """Frees, for ever, the slots of sequences that left; the window has room again when the target confirmed."""
        while True:
            await self._leavers.wait()
            self._leavers.clear()
            if not (leaving := self._pool.leaving):
                continue
            self._drafting.forget(leaving)
            if self._draft is not None:
                await self._draft.release(leaving)
            if await self._target.release(leaving):
                self._pool.released(leaving)
                self._work.set()
            else:
                await asyncio.sleep(RETRY_SECONDS)
                self._leavers.set()

    async def _play_safely(self, group: Group) -> None:
        """Plays a round of the group, whatever happens in it."""
        self._pool.begin_round(group.sequences)
        try:
            gained = await self._play_or_split(group)
        except WorkerUnreachableError:
            gained = True  # nothing is lost; the loop waits until the target is back
        except Exception:  # a fault of ours must end these requests, not the service
            log.exception("a round failed")
            gained = True
            for sequence in group.sequences:
                self._fail(sequence, "internal error in a round")
        finally:
            self._pool.end_round(group.sequences)
            self._work.set()  # another lane may play them next
            self._leavers.set()
        if not gained:
            await asyncio.sleep(RETRY_SECONDS)

    async def _play_or_split(self, group: Group) -> bool:
        """Plays a round of the group. If the target refuses it, of each alone, to find those that it cannot serve."""
        try:
            return await self._play(group)
        except WorkerRefusedError:
            for sequence in group.sequences:
                try:
                    await self._play(Group([sequence]))
                except WorkerRefusedError as error:
                    self._fail(sequence, f"the target worker refused the sequence twice: {error}")
            return True

    async def _play(self, group: Group) -> bool:
        """One round. False if no sequence of the group got anywhere."""
        began = time.perf_counter()
        same_length = group.same_length
        round_id = next(self._round_ids)
        round_ = Round(
            round_id,
            group.sequences,
            self._prefill_tokens,
            self._drafting.orders(group.sequences, self._worker(round_id)),
            self._drafting.calibration.chance,
        )
        proposed = await self._propose(round_)
        items = round_.verify_items()
        if not items:
            return False
        verdicts, verified = await self._verify(round_, items)
        self._drafting.observe_verification(items, verified)
        for commit in round_.commit(verdicts):
            self.counters.add_commit(commit)
            self._drafting.observe(commit)
            self._publish(commit)
        self.counters.rounds += 1
        self.counters.cache_misses += round_.cache_misses
        self.counters.grouping.add(group, same_length)
        self.counters.add_times(proposed, verified, time.perf_counter() - began)
        return any(verdict.status is not ItemStatus.NO_SLOT for verdict in verdicts)

    async def _propose(self, round_: Round) -> Timed:
        if self._draft is None or not self._draft.is_ready:
            return Timed()
        items = round_.propose_items(self._draft.max_model_len, self._draft.vocab_size)
        if not items:
            return Timed()
        began = time.perf_counter()
        try:
            async with self._draft_free:
                proposals, timed = await self._draft.propose(round_.round_id, items, *self._drafting.hints)
        except (WorkerUnreachableError, WorkerRefusedError):
            # The link has logged it; this round decodes plainly.
            return Timed(elapsed=time.perf_counter() - began)
        round_.take_proposals(proposals, self._target.vocab_size)
        self._drafting.observe_proposals(items, proposals, timed)
        return timed

    async def _verify(self, round_: Round, items: list[VerifyItem]) -> tuple[list[Verdict], Timed]:
        """Meanwhile the draft goes on as if all of its tokens were accepted, where it has nothing else to do."""
        ahead = (
            asyncio.create_task(self._draft_ahead(round_, items)) if self._are_separate and self._lanes == 1 else None
        )
        try:
            async with self._target_free:
                verified = await self._target.verify(round_.round_id, items)
        except BaseException:
            if ahead is not None:
                ahead.cancel()
            raise
        if ahead is not None:
            await ahead
        return verified

    async def _draft_ahead(self, round_: Round, verified: list[VerifyItem]) -> None:
        assert self._draft is not None
        items = round_.ahead_items(self._drafting.steps_beside(verified), self._draft.max_model_len)
        if not items:
            return
        try:
            async with self._draft_free:
                proposals, timed = await self._draft.propose(next(self._round_ids), items, *self._drafting.hints)
        except (WorkerUnreachableError, WorkerRefusedError):
            return  # the link has logged it
        round_.take_ahead(proposals, self._target.vocab_size)
        self._drafting.observe_proposals(items, proposals, timed)
        self.counters.stage_seconds["draft"] += timed.forward

    def _worker(self, round_id: int) -> DraftWorker | None:
        """The draft worker, if it can be asked now."""
        self._drafting.costs.verify = self._target.step_times
        if self._draft is None or not self._draft.is_ready:
            return None
        self._drafting.costs.draft = self._draft.step_times
        return DraftWorker(self._draft.max_model_len, round_id)
