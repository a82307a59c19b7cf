"""The draft side of rounds: plans drafts, asks the draft worker before or during the verification, and decides how
rounds overlap.

If the draft worker fails, the round continues without drafts. A carried draft needs no call: the round's items say what
to draft, and rounds run ahead as in plain decoding.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from coordinator.rounds.running import Releasing, RunningRound, Shared
from coordinator.scheduling.grouping import POLICIES, Group
from coordinator.scheduling.sequence import Sequence
from coordinator.scheduling.window import Window
from coordinator.workers.interface import Draft, WorkerRefusedError, Workers, WorkerUnreachableError
from specpool.drafting.costs import Timed
from specpool.drafting.drafting import Drafting
from specpool.drafting.outcome import DraftCall, draft_steps
from specpool.drafting.plans import DraftPlan
from specpool.drafting.sequences import DraftWorker
from specpool.protocol.features import WantedFeatures
from specpool.protocol.rounds import Proposal, ProposeItem

log = logging.getLogger(__name__)

# Maximum rounds in flight: one group drafts while another is verified, or the next round waits at the target worker. A
# round of newcomers may join the waiting one.
MAX_ROUNDS, MAX_ROUNDS_WITH_NEWCOMERS = 2, 3
# How long to wait for branches after a verification, relative to its duration.
MAX_LATENESS = 1.0


class Proposing:
    """Drafts for rounds: of two groups that alternate, or of one group that runs ahead."""

    def __init__(
        self, shared: Shared, window: Window, workers: Workers, drafting: Drafting, releasing: Releasing
    ) -> None:
        self.num_groups = 1
        """Number of groups that alternate, updated with every round."""
        self._window, self._workers, self._target, self._drafting = window, workers, workers.target, drafting
        self._settings, self._counters, self._releasing = shared.settings, shared.counters, releasing
        self._round_ended = asyncio.Event()
        self._not_followed: set[RunningRound] = set()
        """Drafting rounds in flight, until the next round may be sent."""
        self._prepared: tuple[list[tuple[int, int]], dict[int, DraftPlan]] | None = None
        """Draft plans made in advance, with the ids and lengths of their sequences."""
        self._round_ids = count(1)

    # --- Overlap

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
        return self.max_rounds > 1 and self.num_groups == 1 and self._max_rounds_ahead >= MAX_ROUNDS

    @property
    def batch(self) -> int | None:
        """Sequences of both groups if two overlap."""
        return self._window.schedulable if self.num_groups > 1 else None

    @property
    def _runs_ahead(self) -> bool:
        """Whether rounds are sent before the response to the last one, so that the target selects branches."""
        return POLICIES[self._settings.policy].runs_ahead and self._max_rounds_ahead > 0

    @property
    def _max_rounds_ahead(self) -> int:
        return self._target.info.max_rounds_ahead if self._target.info is not None else 0

    @property
    def _can_overlap(self) -> bool:
        """Whether both workers can run at the same time without slowing each other down."""
        overlap = self._settings.overlap
        if self._workers.ready_draft is None or overlap == "off" or self._settings.policy == "eqspec":
            return False
        return overlap == "on" or not self._shares_devices

    @property
    def _shares_devices(self) -> bool:
        draft = self._workers.ready_draft
        return draft is not None and not draft.hosts_and_devices.isdisjoint(self._target.hosts_and_devices)

    def round_ended(self) -> None:
        """Call after a round has ended."""
        self._round_ended.set()
        self._round_ended = asyncio.Event()

    # --- Plan

    def plan(self, group: Group, sent: Callable[[], None], may_join: bool) -> RunningRound:
        """The next round, of this group. See `RunningRound`."""
        round_id, sequences = next(self._round_ids), group.sequences
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] == _ids_and_lengths(sequences):
            plans = prepared[1]
        else:
            plans = self._plan_drafts(sequences, round_id)
        round_ = RunningRound(
            round_id,
            group,
            plans,
            sent=sent,
            may_join=may_join,
            prefill_tokens=self._settings.prefill_tokens,
            chance=self._drafting.chance,
            pass_seconds=self._target.step_times,
            features=self._features,
            own_draft=self._workers.own_draft,
        )
        overlaps = self._can_overlap and not round_.drafts_ahead
        self.num_groups = 1 + (overlaps and self._drafting.overlap_pays(self._window.schedulable))
        if round_.wants_drafts:
            self._not_followed.add(round_)
        return round_

    def _plan_drafts(self, sequences: list[Sequence], round_id: int) -> dict[int, DraftPlan]:
        draft, own, worker = self._workers.ready_draft, self._workers.own_draft, None
        if own is not None:
            for sequence in sequences:
                sequence.draft.model = None
            times, reads_states = self._target.draft_step_times, own.features is not None
            worker = DraftWorker(own.max_model_len, round_id, times, reads_states=reads_states, is_own=True)
        elif draft is not None:
            roster = draft.roster
            self._drafting.assign(sequences, roster.models)
            worker = DraftWorker(
                0,
                round_id,
                draft.step_times,
                max_branches=roster.max_branches if self._can_overlap else 0,
                selects_branches=self._runs_ahead,
                reads_states=roster.features is not None,
            )
        return self._drafting.plan_round(sequences, worker, self._target.step_times, self.batch)

    @property
    def _features(self) -> WantedFeatures | None:
        """Hidden states that the draft workers read."""
        draft = self._workers.ready_draft
        features, target = draft.roster.features if draft is not None else None, self._target.info
        if features is None or target is None or not target.returns_features:
            return None
        return WantedFeatures(features, self._settings.feature_window)

    def prepare(self, last: RunningRound | None) -> None:
        """Plan the next round's drafts while the last one sent drafts branches, so that it can be sent right after."""
        if last is None or last not in self._not_followed or not self._runs_ahead or self.num_groups > 1:
            return
        sequences = [sequence for sequence in last.group.sequences if sequence.finish is None]
        if sequences and last.drafts_ahead:
            self._prepared = _ids_and_lengths(sequences), self._plan_drafts(sequences, last.round_id + 1)

    def forget(self, round_: RunningRound) -> None:
        """Call when a round has ended in any way."""
        self._not_followed.discard(round_)

    @property
    def _vocab_size(self) -> int:
        assert self._target.info is not None
        return self._target.info.vocab_size

    # --- Propose

    async def propose(self, round_: RunningRound) -> None:
        """Draft before the verification, or take the branches drafted during the last one."""
        sequences = round_.group.sequences
        while round_.wants_drafts and not round_.drafts_ahead and self._window.has_other_rounds(sequences):
            await self._round_ended.wait()  # the draft worker needs the tokens that they commit
        round_.begin(self._target.instance_id, is_quiet=self.num_groups == 1 or not self._shares_devices)
        draft = self._workers.ready_draft
        if round_.drafts_ahead or (self._runs_ahead and not round_.wants_drafts):
            round_.take_branches(self._runs_ahead)
        elif draft is not None and round_.wants_drafts and (items := round_.propose_items(draft.roster.limits)):
            began, round_.outcome.called_draft = time.perf_counter(), True
            with _draft_failures_ignored("proposal failed; decoding plainly"):
                proposals, round_.proposed = await self._call_draft(draft, round_.round_id, items, round_)
                round_.take_proposals(proposals, self._vocab_size)
                round_.outcome.draft_calls.append(DraftCall(draft_steps(items, proposals), round_.proposed))
                return
            round_.proposed = Timed(elapsed=time.perf_counter() - began)

    def let_follow(self, round_: RunningRound) -> None:
        """Allow the next round to be sent before the response to this one, unless it drafts.

        A drafting round is followed only once its branches are drafted. Newcomers can join the group until then.
        """
        if self._runs_ahead and self.num_groups == 1 and not round_.wants_drafts:
            self._follow(round_)

    def _follow(self, round_: RunningRound) -> None:
        self._not_followed.discard(round_)
        self._window.round_sent(round_.group.sequences)
        round_.sent()

    # --- Draft ahead

    def draft_ahead(self, round_: RunningRound, previous: RunningRound | None) -> None:
        """Draft branches while a round is verified, if it is planned. `previous`: still in flight."""
        if round_.drafts_ahead:
            ahead = round_.drafting_ahead = asyncio.create_task(self._draft_ahead(round_, previous))
            self._releasing.drafting_ahead.add(ahead)
            ahead.add_done_callback(self._releasing.drafting_ahead.discard)

    async def wait_for_branches(self, round_: RunningRound) -> None:
        """Wait for the branches of a verified round, but not much longer than its verification took."""
        if round_.drafting_ahead is not None and not round_.drafting_ahead.done():
            outcome = round_.outcome
            rows = sum(item.max_num_new_tokens + len(item.draft_token_ids) for item in outcome.verify_items)
            usual = max(outcome.verified.elapsed, self._target.step_times(rows))  # `elapsed` is short if read late
            await asyncio.wait([round_.drafting_ahead], timeout=MAX_LATENESS * usual)

    async def _draft_ahead(self, round_: RunningRound, previous: RunningRound | None) -> None:
        """Draft branches for the most probable outcomes of the verification, then let the next round follow."""
        if previous is not None:
            await previous.committed.wait()  # its outcome selects the drafts of this round
            if previous.failed:
                return
        began = time.perf_counter()
        with _draft_failures_ignored("discarding branches"):
            await self._draft_branches(round_)
        if round_.committed.is_set():
            return
        if previous is not None and round_.outcome.draft_calls:
            round_.outcome.ahead_seconds = time.perf_counter() - began
        if self._runs_ahead:
            self._follow(round_)

    async def _draft_branches(self, round_: RunningRound) -> None:
        draft, outcome = self._workers.ready_draft, round_.outcome
        if draft is not None and (items := round_.ahead_items(draft.roster.limits)):
            outcome.called_draft = outcome.drafted_ahead = True
            outcome.is_quiet = outcome.is_quiet and not self._shares_devices
            slack = self._target.step_times(sum(outcome.rows.values()))
            proposals, timed = await self._call_draft(draft, next(self._round_ids), items, round_, slack)
            self._counters.stage_seconds["draft"] += timed.forward
            call = DraftCall(draft_steps(items, proposals), timed)
            if round_.committed.is_set():  # too late
                self._drafting.observe_draft(call)
                return
            round_.take_ahead(proposals, self._vocab_size)
            outcome.draft_calls.append(call)

    async def _call_draft(
        self, draft: Draft, round_id: int, items: list[ProposeItem], round_: RunningRound, slack: float = 0.0
    ) -> tuple[list[Proposal], Timed]:
        """Ask the draft workers. `slack`: seconds of the verification that runs at the same time; 0: none."""
        with round_.trace.calling("propose", round_id) as parent:
            return await draft.propose(round_id, items, round_.models, self._drafting.step_cost, parent, slack)


def _ids_and_lengths(sequences: list[Sequence]) -> list[tuple[int, int]]:
    return [(sequence.sequence_id, len(sequence.token_ids)) for sequence in sequences]


@contextmanager
def _draft_failures_ignored(consequence: str) -> Iterator[None]:
    """Log and ignore errors of the draft worker, which must never fail a request."""
    try:
        yield
    except (WorkerUnreachableError, WorkerRefusedError):
        pass  # logged by the link
    except Exception:
        log.exception(consequence)
