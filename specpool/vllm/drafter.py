"""Maps vLLM's steps to rounds: builds requests to the draft worker, and returns drafts to vLLM. Pure.

Draft lengths, prompt lookup and learning from rounds reuse the coordinator's code. vLLM takes the place of the target
worker: the tokens that a row gains in a step are the verdict on its drafts.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from itertools import count

from coordinator.scheduling.prefixes import PrefixIndex
from coordinator.scheduling.round import Round
from coordinator.scheduling.sequence import Finish, FinishReason, GenerationRequest, Sequence
from specpool.drafting.costs import StepTimes, Timed
from specpool.drafting.drafting import Drafting, DraftWorker
from specpool.drafting.plans import MAX_DRAFT_LAG, DraftMethod, DraftPlan
from specpool.protocol.rounds import ItemStatus, Proposal, ProposeItem, Verdict
from specpool.protocol.worker_info import WorkerInfo
from specpool.vllm.costs import StepCosts
from specpool.vllm.rows import Batch, Rows


@dataclass(frozen=True)
class Limits:
    """Limits of drafts."""

    num_speculative_tokens: int
    """Maximum draft tokens of a row."""
    max_model_len: int
    """Maximum tokens of a row in vLLM."""
    vocab_size: int
    """Token ids in vLLM are below this."""
    draft_max_length: int
    """Maximum positions of a row in the draft worker."""
    prefill_tokens: int
    """Maximum prompt tokens sent to the draft worker in one step, for all rows together."""


@dataclass(frozen=True)
class DraftModel:
    """The description and costs of the draft worker."""

    info: WorkerInfo
    step_times: StepTimes


class Drafter:
    """Drafts for vLLM's rows. In each step, call `begin`, `take` if the draft worker answered, then `drafts`."""

    def __init__(self, limits: Limits) -> None:
        self.round_id = 0
        """Number of the current round."""
        self._costs = StepCosts()
        self.drafting = Drafting(limits.num_speculative_tokens, self._costs)
        self._limits = limits
        self._ids = count(1)
        self._sequences: list[Sequence] = []
        self.forget_rows()

    def forget_rows(self) -> list[int]:
        """Treat all rows of the next step as new. Return the sequences to release in the draft worker."""
        gone, self._sequences = self._sequences, []
        self.drafting.forget(sequence.sequence_id for sequence in gone)
        self._rows, self._prefixes = Rows(), PrefixIndex()
        self._round = Round(self.round_id, [], self._limits.prefill_tokens)
        self._step_tokens: dict[int, int] = {}
        """Tokens in vLLM's current step by sequence; empty unless all rows decode."""
        self._asked = False
        """Whether the draft worker was asked before the current step."""
        return [sequence.sequence_id for sequence in gone]

    def begin(
        self, batch: Batch, draft: DraftModel | None, step_seconds: float, draft_seconds: float, skipped: int = 0
    ) -> tuple[list[ProposeItem], list[int]]:
        """Commit the tokens that the rows gained. Return items for the draft worker, and sequences to release there.

        `draft`: None if the draft worker is unavailable. `step_seconds`: duration of vLLM's last step.
        `draft_seconds`: duration of drafting before that step. `skipped`: number of steps since the last `begin`.
        """
        gone = self._commit(batch, step_seconds, draft_seconds, skipped)
        if draft is not None:
            self.drafting.costs.draft = draft.step_times
            self._prefixes.trim(draft.info.slots_total - len(self._sequences))
        self.round_id += 1
        group = [sequence for sequence in self._sequences if sequence.finish is None]
        info = draft.info if draft is not None else WorkerInfo()
        info = replace(info, max_model_len=min(info.max_model_len, self._limits.draft_max_length))
        worker = DraftWorker(info.max_model_len, self.round_id) if draft is not None else None
        plans = self._plans(group, worker) if group else {}
        chance = self.drafting.calibration.chance
        self._round = Round(self.round_id, group, self._limits.prefill_tokens, plans, chance)
        items = self._round.propose_items(info) if draft is not None else []
        self._asked = bool(items)
        return items, [sequence.sequence_id for sequence in gone]

    def take(self, items: list[ProposeItem], proposals: list[Proposal], timed: Timed) -> None:
        """Take the draft worker's answer."""
        self._round.take_proposals(proposals, self._limits.vocab_size)
        self.drafting.observe_proposals(items, proposals, timed)
        if any(len(item.token_ids) > MAX_DRAFT_LAG for item in items):
            # The first drafts always catch up. A worker that measured itself while vLLM started overestimates them.
            self.drafting.costs.draft.observe_steps(_pass_rows(items, proposals), timed.forward)

    def drafts(self) -> list[list[int]]:
        """Draft tokens of each row for vLLM to verify in its next step."""
        items = self._round.verify_items()
        all_decode = len(items) == len(self._sequences) and all(len(item.token_ids) == 1 for item in items)
        tokens = {item.sequence_id: 1 + len(item.draft_token_ids) for item in items}
        self._step_tokens = tokens if all_decode else {}
        by_id = {item.sequence_id: item.draft_token_ids for item in items}
        return [list(by_id.get(sequence.sequence_id, ())) for sequence in self._sequences]

    @property
    def may_skip(self) -> bool:
        """Whether this round has no drafts, and measuring its step would add nothing."""
        rows = len(self._step_tokens)
        is_plain = rows > 0 and not self._asked and sum(self._step_tokens.values()) == rows
        lengths = self.drafting.lengths
        return is_plain and lengths.rests(rows) and not lengths.ledger.is_plain_due(rows)

    def _plans(self, group: Items[Sequence], worker: DraftWorker | None) -> dict[int, DraftPlan]:
        """Draft plans by sequence id. The first trials verify a token of every row, to learn what that costs."""
        plans = self.drafting.plan_round(group, worker)
        is_trial = any(plan.is_trial for plan in plans.values())
        if is_trial and not self._costs.verify.seen(2 * len(group)):
            for sequence in group:
                plan = plans[sequence.sequence_id]
                if sequence.max_num_draft_tokens > 0 and not plan.num_draft_tokens and not plan.lookup_ids:
                    plans[sequence.sequence_id] = plan._replace(lookup_ids=tuple(sequence.token_ids[-1:]))
        return plans

    def _commit(self, batch: Batch, step_seconds: float, draft_seconds: float, skipped: int) -> list[Sequence]:
        """Commit the tokens that the rows gained. Return the sequences without a row."""
        matched, gone = self._rows.match(batch, skipped > 0)
        continued = [(row, sequence) for row, sequence in enumerate(matched) if sequence is not None]
        if self._step_tokens and all(batch.sampled) and len(continued) == len(matched):  # all rows decoded
            tokens = sum(self._step_tokens[sequence.sequence_id] for _, sequence in continued)
            self._costs.verify.observe(tokens, step_seconds)
            method = DraftMethod.MODEL if self._asked else DraftMethod.NGRAM if tokens > len(matched) else None
            seconds = step_seconds + draft_seconds * self._asked
            ledger, is_trial = self.drafting.lengths.ledger, self._round.is_trial
            ledger.observe(len(matched), sum(batch.sampled), seconds, method, is_trial, skipped)
        for commit in self._round.commit([_verdict(s, batch, row) for row, s in continued if batch.sampled[row]]):
            self.drafting.observe(commit)
        for sequence in gone:
            sequence.finish = Finish(FinishReason.STOP)
            sequence.draft.copy_nothing()  # otherwise chains of finished caches stay in memory
            self._prefixes.finish(sequence)
        self.drafting.forget(sequence.sequence_id for sequence in gone)
        self._sequences = [sequence or self._new_sequence(batch, row) for row, sequence in enumerate(matched)]
        self._rows.keep(self._sequences)
        return gone

    def _new_sequence(self, batch: Batch, row: int) -> Sequence:
        """The sequence of a new row, or of one that vLLM has preempted and resumed."""
        length = batch.lengths[row]
        request = GenerationRequest(
            request_id="",
            prompt_ids=tuple(batch.read(row, 0, length)),
            max_tokens=max(1, self._limits.max_model_len - length),
            stop_token_ids=frozenset(),
            num_speculative_tokens=self._limits.num_speculative_tokens,
            adaptive=True,
            method=DraftMethod.BEST,
        )
        sequence = Sequence(next(self._ids), request)
        if (prefix := self._prefixes.find(sequence)) is not None:
            sequence.draft.copy_from(prefix.source.draft, prefix.length)
        sequence.target.commit(length - 1 if batch.sampled[row] else 0)
        self._prefixes.add(sequence)
        return sequence


def _pass_rows(items: list[ProposeItem], proposals: list[Proposal]) -> list[int]:
    """Rows of each pass that the draft worker ran for these items."""
    lengths = [len(proposal.draft_token_ids) for proposal in proposals]
    later = [sum(length > step for length in lengths) for step in range(1, max(lengths, default=0))]
    return [sum(len(item.token_ids) for item in items), *later]


def _verdict(sequence: Sequence, batch: Batch, row: int) -> Verdict:
    length = batch.lengths[row]
    gained: Items[int] = batch.read(row, len(sequence.token_ids), length)
    return Verdict(sequence.sequence_id, ItemStatus.OK, tuple(gained), length - 1)
