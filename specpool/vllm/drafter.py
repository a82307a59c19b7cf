"""vLLM's steps as rounds: what to ask the draft worker, and which drafts to hand to vLLM. Pure.

Draft lengths, prompt lookup and what is learned from a round are the coordinator's own: vLLM takes the target worker's
place, and the tokens that a row has gained by its next step are the verdict on its drafts.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import count

from coordinator.drafting.costs import StepTimes
from coordinator.drafting.drafting import Drafting, DraftWorker
from coordinator.scheduling.commits import DraftPlan
from coordinator.scheduling.counters import Timed
from coordinator.scheduling.prefixes import PrefixIndex
from coordinator.scheduling.round import Round
from coordinator.scheduling.sequence import (
    MAX_DRAFT_LAG,
    DraftMethod,
    Finish,
    FinishReason,
    GenerationRequest,
    Sequence,
)
from specpool.protocol.rounds import ItemStatus, Proposal, ProposeItem, Verdict
from specpool.vllm.costs import StepCosts
from specpool.vllm.pacing import Mode, Pacing
from specpool.vllm.rows import Batch, Rows


@dataclass(frozen=True)
class Limits:
    """What bounds the drafts."""

    num_speculative_tokens: int
    """Most draft tokens of a row."""
    max_model_len: int
    """Most tokens of a row in vLLM."""
    vocab_size: int
    """Token ids that vLLM knows are below this."""
    draft_max_length: int
    """Most positions of a row in the draft worker."""
    prefill_tokens: int
    """Tokens of long catch-ups that the draft worker is sent in one step, for all rows together."""


@dataclass(frozen=True)
class DraftModel:
    """The draft worker in a step."""

    max_model_len: int
    """Positions that a sequence can have there."""
    vocab_size: int
    slots: int
    step_times: StepTimes


class Drafter:
    """Drafts for vLLM's rows, step after step: `begin`, `take` if the draft worker was asked, `drafts`."""

    def __init__(self, limits: Limits) -> None:
        self.round_id = 0
        """Number of the present round."""
        costs = StepCosts()
        self.drafting, self._pacing = Drafting(limits.num_speculative_tokens, costs), Pacing(costs)
        self._limits = limits
        self._ids = count(1)
        self._sequences: list[Sequence] = []
        self.forget_rows()

    def forget_rows(self) -> list[int]:
        """Takes all rows of the next step for new ones. Returns the sequences that the draft worker may free."""
        gone, self._sequences = self._sequences, []
        self.drafting.forget(sequence.sequence_id for sequence in gone)
        self._rows, self._prefixes = Rows(), PrefixIndex()
        self._round = Round(self.round_id, [], self._limits.prefill_tokens)
        self._running: dict[int, int] = {}
        """Tokens that vLLM runs in its present step, by sequence, if all of its rows decode; none if not."""
        self._asked = False
        """Whether the draft worker was asked before the present step."""
        return [sequence.sequence_id for sequence in gone]

    def begin(
        self, batch: Batch, draft: DraftModel | None, step_seconds: float, draft_seconds: float, skipped: int = 0
    ) -> tuple[list[ProposeItem], list[int]]:
        """Takes in what the rows have gained. Returns what to ask the draft worker, and sequences that it may free.

        `draft`: None if the draft worker cannot be asked now. `step_seconds`: the time that vLLM took for its step.
        `draft_seconds`: the time that its drafts took before it. `skipped`: steps since the last `begin`.
        """
        gone = self._take_in(batch, step_seconds, draft_seconds, skipped)
        if draft is not None:
            self.drafting.costs.draft = draft.step_times
            self._prefixes.trim(draft.slots - len(self._sequences))
        self.round_id += 1
        group = [sequence for sequence in self._sequences if sequence.finish is None]
        longest = min(draft.max_model_len, self._limits.draft_max_length) if draft is not None else 0
        worker = DraftWorker(longest, self.round_id) if draft is not None else None
        plans = self._plans(group, worker) if group else {}
        chance = self.drafting.calibration.chance
        self._round = Round(self.round_id, group, self._limits.prefill_tokens, plans, chance)
        items = self._round.propose_items(longest, draft.vocab_size) if draft is not None else []
        self._asked = bool(items)
        return items, [sequence.sequence_id for sequence in gone]

    def take(self, items: list[ProposeItem], proposals: list[Proposal], timed: Timed) -> None:
        """Takes in the draft worker's answer."""
        self._round.take_proposals(proposals, self._limits.vocab_size)
        self.drafting.observe_proposals(items, proposals, timed)
        if any(len(item.token_ids) > MAX_DRAFT_LAG for item in items):
            # The first drafts always catch up. A worker that measured itself while vLLM started is faster than it says.
            self.drafting.costs.draft.observe_steps(_passes(items, proposals), timed.forward)

    def drafts(self) -> list[list[int]]:
        """The draft tokens of each row, for vLLM to verify in its next step; possibly none."""
        items = self._round.verify_items()
        decode = len(items) == len(self._sequences) and all(len(item.token_ids) == 1 for item in items)
        self._running = {item.sequence_id: 1 + len(item.draft_token_ids) for item in items} if decode else {}
        by_id = {item.sequence_id: item.draft_token_ids for item in items}
        return [list(by_id.get(sequence.sequence_id, ())) for sequence in self._sequences]

    @property
    def may_rest(self) -> bool:
        """Whether nothing is drafted in this round, nor anything to be learned from the next step."""
        rows = len(self._running)
        is_plain = rows > 0 and not self._asked and sum(self._running.values()) == rows
        return is_plain and self._pacing.knows(rows)

    def _plans(self, group: Items[Sequence], worker: DraftWorker | None) -> dict[int, DraftPlan]:
        """The draft plan of each sequence id."""
        plan = self.drafting.lengths.plan
        mode = self._pacing.mode(len(group), plan.speed if plan.steps else 0.0)
        is_probe = mode is Mode.PROBE and all(sequence.is_decoding for sequence in group)  # other steps are not timed
        if mode is not Mode.PLAIN and not is_probe:
            return self.drafting.plan_round(group, worker)
        for sequence in group:  # so that it goes on to learn how often its tokens are right
            self.drafting.lookup.look_up(sequence, sequence.max_num_draft_tokens)
        return {
            s.sequence_id: DraftPlan(lookup_ids=tuple(s.token_ids[-1:]) if is_probe and s.max_num_draft_tokens else ())
            for s in group
        }

    def _observe(
        self, found: Items[Sequence | None], batch: Batch, step_seconds: float, draft_seconds: float, skipped: int
    ) -> None:
        """Learns from the time of a step in which all rows decoded."""
        if not self._running or not all(batch.sampled) or None in found:
            return
        tokens = sum(self._running[sequence.sequence_id] for sequence in found if sequence is not None)
        spent = draft_seconds if self._asked else 0.0
        self._pacing.observe(len(found), tokens, sum(batch.sampled), step_seconds, spent, skipped)

    def _take_in(self, batch: Batch, step_seconds: float, draft_seconds: float, skipped: int) -> list[Sequence]:
        """Commits what the rows have gained. Returns the sequences whose rows are gone."""
        found, gone = self._rows.match(batch, skipped > 0)
        self._observe(found, batch, step_seconds, draft_seconds, skipped)
        verdicts = [
            _verdict(sequence, batch, row)
            for row, sequence in enumerate(found)
            if sequence is not None and batch.sampled[row]
        ]
        for commit in self._round.commit(verdicts):
            self.drafting.observe(commit)
        self._forget(gone)
        self._sequences = [sequence or self._newcomer(batch, row) for row, sequence in enumerate(found)]
        self._rows.keep(self._sequences)
        return gone

    def _newcomer(self, batch: Batch, row: int) -> Sequence:
        """The sequence of a new row, or of one that vLLM has preempted and resumed."""
        length = batch.lengths[row]
        tokens = tuple(batch.read(row, 0, length))
        request = GenerationRequest(
            request_id="",
            prompt_ids=tokens,
            max_tokens=max(1, self._limits.max_model_len - length),
            stop_token_ids=frozenset(),
            num_speculative_tokens=self._limits.num_speculative_tokens,
            adaptive=True,
            method=DraftMethod.BEST,
        )
        sequence = Sequence(next(self._ids), request)
        sequence.draft_prefix = self._prefixes.find(sequence)
        sequence.num_cached_tokens = length - 1 if batch.sampled[row] else 0
        self._prefixes.add(sequence)
        return sequence

    def _forget(self, gone: Iterable[Sequence]) -> None:
        for sequence in gone:
            sequence.finish = Finish(FinishReason.STOP)
            sequence.draft_prefix = None  # else whole histories would be kept alive
            self._prefixes.finish(sequence)
        self.drafting.forget(sequence.sequence_id for sequence in gone)


def _passes(items: list[ProposeItem], proposals: list[Proposal]) -> list[int]:
    """Rows of the passes that the draft worker ran for these items."""
    lengths = [len(proposal.draft_token_ids) for proposal in proposals]
    later = [sum(length > step for length in lengths) for step in range(1, max(lengths, default=0))]
    return [sum(len(item.token_ids) for item in items), *later]


def _verdict(sequence: Sequence, batch: Batch, row: int) -> Verdict:
    length = batch.lengths[row]
    gained: Items[int] = batch.read(row, len(sequence.token_ids), length)
    return Verdict(sequence.sequence_id, ItemStatus.OK, tuple(gained), length - 1)
