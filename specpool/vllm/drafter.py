"""Maps vLLM's steps to rounds of the draft worker: builds its requests, and returns drafts to vLLM. Pure.

vLLM takes the place of the target worker: the tokens that a row gains in a step are the verdict on its drafts.
"""

from dataclasses import dataclass
from itertools import count
from operator import itemgetter

from specpool.drafting.acceptance import agreement_length, known_tokens, likely_tokens
from specpool.drafting.costs import StepTimes, Timed
from specpool.drafting.draft_lengths import SMALL_LAG
from specpool.drafting.drafting import Drafting
from specpool.drafting.outcome import DraftCall, draft_steps, lookup_parts
from specpool.drafting.plans import MAX_DRAFT_LAG, NO_LOOKUP, DraftMethod, DraftPlan, Lookup
from specpool.drafting.sequences import DraftWorker
from specpool.drafting.sources import DraftSources
from specpool.protocol.rounds import ItemStatus, Proposal, ProposeItem
from specpool.protocol.sampling import SamplingParams
from specpool.protocol.worker_info import WorkerInfo
from specpool.vllm.costs import StepCosts
from specpool.vllm.rows import Batch, Request, Sequence, match

# Steps without a call for a row after the draft worker had no free slot.
BACKOFF_ROUNDS = 16
# vLLM does not identify the client of a row, so all rows share the draft worker's prefix cache and stored answers.
CACHE_NAMESPACE, SHARED_SALT = b"", "shared"


@dataclass(frozen=True)
class Limits:
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
    lookup_store_tokens: int = 0
    """Maximum tokens of finished answers to store for lookups by all later rows."""


@dataclass(frozen=True)
class DraftModel:
    """The description and costs of the draft worker."""

    info: WorkerInfo
    step_times: StepTimes


@dataclass(eq=False)
class Drafts:
    """The drafts of a sequence in a step, and then what it gained; a `specpool.drafting.sequences.Commit`."""

    sequence: Sequence
    plan: DraftPlan
    proposal: Proposal | None = None
    """The draft worker's answer, possibly only partly verified."""
    likely_ids: tuple[int, ...] = ()
    """Tokens of the proposal that are worth verifying."""
    draft_ids: tuple[int, ...] = ()
    """Tokens that vLLM verifies."""
    token_ids: tuple[int, ...] = ()
    """Tokens that the sequence gained."""
    forced = num_branches = 0
    branch = None

    @property
    def num_draft_tokens(self) -> int:
        """Tokens to request from the draft worker."""
        return min(self.plan.num_draft_tokens, self.sequence.max_num_draft_tokens)

    @property
    def drafted(self) -> int:
        return len(self.draft_ids)

    @property
    def num_agreed(self) -> int:
        return len(self.token_ids) - 1

    @property
    def method(self) -> DraftMethod | None:
        if not self.draft_ids:
            return None
        return DraftMethod.MODEL if self.likely_ids else self.plan.lookup.source.method

    @property
    def lookup(self) -> Lookup:
        return self.plan.lookup


class Drafter:
    """Drafts for vLLM's rows. In each step, call `begin`, `take` if the draft worker answered, then `drafts`."""

    def __init__(self, limits: Limits, method: DraftMethod = DraftMethod.BEST) -> None:
        self.round_id = 0
        """Number of the current round."""
        self._costs = StepCosts()
        sources = DraftSources(limits.lookup_store_tokens)
        self.drafting = Drafting(limits.num_speculative_tokens, self._costs, sources)
        salt = SHARED_SALT if limits.lookup_store_tokens else ""
        self._limits, self._request = limits, Request(limits.num_speculative_tokens, method, salt)
        self._ids = count(1)
        self._sequences: list[Sequence] = []
        self.forget_rows()

    def forget_rows(self) -> list[int]:
        """Treat all rows of the next step as new. Return the sequences to release in the draft worker."""
        gone, self._sequences = [sequence.sequence_id for sequence in self._sequences], []
        self.drafting.forget(gone)
        self._drafts: dict[int, Drafts] = {}
        """By sequence id, of vLLM's current step."""
        self._all_decode = False
        """Whether all rows of the current step decode."""
        self._asked = False
        """Whether the draft worker was asked before the current step."""
        return gone

    def begin(
        self, batch: Batch, draft: DraftModel | None, step_seconds: float, draft_seconds: float, skipped: int = 0
    ) -> tuple[list[ProposeItem], list[int]]:
        """Commit the tokens that the rows gained. Return items for the draft worker, and sequences to release there.

        `draft`: None if the draft worker is unavailable. `step_seconds`: duration of vLLM's last step.
        `draft_seconds`: duration of drafting before that step. `skipped`: number of steps since the last `begin`.
        """
        gone = self._commit(batch, step_seconds, draft_seconds, skipped)
        self.round_id += 1
        worker, items = None, []
        if draft is not None:
            self.drafting.costs.draft = draft.step_times
            worker = DraftWorker(min(draft.info.max_model_len, self._limits.draft_max_length), self.round_id)
        plans = self._plans(worker) if self._sequences else {}
        self._drafts = {s.sequence_id: Drafts(s, plans[s.sequence_id]) for s in self._sequences}
        if draft is not None and worker is not None:
            items = self._items(worker.max_model_len, draft.info.vocab_size)
        self._asked = bool(items)
        return items, gone

    def take(self, items: list[ProposeItem], proposals: list[Proposal], timed: Timed) -> None:
        """Take the draft worker's answer."""
        for proposal in proposals:
            self._take(self._drafts[proposal.sequence_id], proposal)
        self.drafting.observe_draft(DraftCall(draft_steps(items, proposals), timed))
        if any(len(item.token_ids) > MAX_DRAFT_LAG for item in items):
            # The first drafts always catch up. A worker that measured itself while vLLM started overestimates them.
            self.drafting.costs.draft.observe_steps(_pass_rows(items, proposals), timed.forward)

    def _take(self, drafts: Drafts, proposal: Proposal) -> None:
        cache, length = drafts.sequence.draft, len(drafts.sequence.token_ids)
        if proposal.status is ItemStatus.OK:
            cache.commit(min(proposal.num_cached_tokens, length))  # draft tokens are not committed yet
            known = known_tokens(proposal.draft_token_ids, self._limits.vocab_size)
            chances = map(self.drafting.chance, proposal.confidences)
            drafts.proposal, drafts.likely_ids = proposal, likely_tokens(known, chances, drafts.plan.min_chance)
        else:
            cache.commit(0)
            if proposal.status is ItemStatus.NO_SLOT:
                cache.backoff_until = self.round_id + BACKOFF_ROUNDS

    def drafts(self) -> list[list[int]]:
        """Draft tokens of each row for vLLM to verify in its next step."""
        for each in self._drafts.values():
            if each.sequence.is_decoding:
                each.draft_ids = each.likely_ids or each.plan.lookup_ids
        self._all_decode = all(sequence.is_decoding for sequence in self._sequences)
        return [list(self._drafts[sequence.sequence_id].draft_ids) for sequence in self._sequences]

    @property
    def may_skip(self) -> bool:
        """Whether this round has no drafts, and measuring its step would add nothing."""
        rows = len(self._sequences)
        is_plain = (
            rows > 0
            and self._all_decode
            and not self._asked
            and not any(each.draft_ids for each in self._drafts.values())
        )
        lengths = self.drafting.lengths
        return is_plain and lengths.rests(rows) and not lengths.ledger.is_plain_due(rows)

    def _plans(self, worker: DraftWorker | None) -> dict[int, DraftPlan]:
        """Draft plans by sequence id. The first trials verify a token of every row, to learn what that costs."""
        plans = self.drafting.plan_round(self._sequences, worker)
        is_trial = any(plan.is_trial for plan in plans.values())
        if is_trial and not self._costs.verify.seen(2 * len(self._sequences)):
            for sequence in self._sequences:
                plan = plans[sequence.sequence_id]
                if sequence.max_num_draft_tokens > 0 and not plan.num_draft_tokens and not plan.lookup_ids:
                    plans[sequence.sequence_id] = plan._replace(lookup_ids=tuple(sequence.token_ids[-1:]))
        return plans

    def _items(self, max_length: int, vocab_size: int) -> list[ProposeItem]:
        """Items for the draft worker. All rows share the budget for prompts; the shortest remainders come first."""
        budget, items = self._limits.prefill_tokens, []
        missing = [(self._missing(drafts, max_length), drafts) for drafts in self._drafts.values()]
        for lacking, drafts in sorted(missing, key=itemgetter(0)):
            num_tokens = lacking
            if lacking > SMALL_LAG:
                num_tokens = min(lacking, budget)
                budget -= num_tokens
            item = _item(drafts, num_tokens, max_length)
            # vLLM's output head can be larger than the draft's, and yield tokens outside the draft's vocabulary.
            if item.token_ids and max(item.token_ids) < vocab_size:
                items.append(item)
        return items

    def _missing(self, drafts: Drafts, max_length: int) -> int:
        """Number of tokens to send to the draft worker; 0 to leave the sequence out."""
        sequence, length = drafts.sequence, len(drafts.sequence.token_ids)
        if drafts.num_draft_tokens <= 0 or length >= max_length or self.round_id < sequence.draft.backoff_until:
            return 0
        return length - _base_length(sequence) if sequence.is_decoding else length - sequence.draft.num_cached_tokens

    def _commit(self, batch: Batch, step_seconds: float, draft_seconds: float, skipped: int) -> list[int]:
        """Commit the tokens that the rows gained. Return the sequences without a row."""
        matched, without_row = match(self._sequences, batch, skipped > 0)
        continued = [(row, self._drafts[s.sequence_id]) for row, s in enumerate(matched) if s is not None]
        for row, drafts in continued:
            if batch.sampled[row]:
                self._gain(drafts, batch, row)
        if continued and self._all_decode and all(batch.sampled) and len(continued) == len(matched):
            self._observe_step([drafts for _, drafts in continued], step_seconds, draft_seconds, skipped)
        gone = [sequence.sequence_id for sequence in without_row]
        for sequence in without_row:
            sequence.is_complete = True
            self.drafting.sources.observe(sequence, NO_LOOKUP)
        self.drafting.forget(gone)
        self._sequences = [sequence or self._new_sequence(batch, row) for row, sequence in enumerate(matched)]
        return gone

    def _observe_step(self, commits: list[Drafts], step_seconds: float, draft_seconds: float, skipped: int) -> None:
        """Learn from the duration of a step in which all rows decoded."""
        drafted = sum(drafts.drafted for drafts in commits)
        self._costs.verify.observe(len(commits) + drafted, step_seconds)
        method = DraftMethod.MODEL if self._asked else DraftMethod.NGRAM if drafted else None
        self.drafting.lengths.ledger.observe(
            len(commits),
            sum(len(drafts.token_ids) for drafts in commits),
            step_seconds + draft_seconds * self._asked,
            method,
            any(drafts.plan.is_trial for drafts in self._drafts.values()),
            skipped,
            {} if self._asked else lookup_parts(commits),
        )

    def _gain(self, drafts: Drafts, batch: Batch, row: int) -> None:
        """Append the tokens that a row gained. The draft worker's cache remains valid as far as it agrees with them."""
        sequence, proposal, length = drafts.sequence, drafts.proposal, len(drafts.sequence.token_ids)
        drafts.token_ids = tuple(batch.read(row, length, batch.lengths[row]))
        if proposal is not None and proposal.num_cached_tokens:
            agreed = length + agreement_length(proposal.draft_token_ids, drafts.token_ids)
            sequence.draft.commit(min(proposal.num_cached_tokens, agreed))
        sequence.token_ids += drafts.token_ids
        sequence.is_decoding = True
        self.drafting.observe(drafts)

    def _new_sequence(self, batch: Batch, row: int) -> Sequence:
        """The sequence of a new row, or of one that vLLM has preempted and resumed."""
        token_ids, is_decoding = batch.read(row, 0, batch.lengths[row]), batch.sampled[row] > 0
        return Sequence(next(self._ids), self._request, token_ids, self._limits.max_model_len, is_decoding)


def _base_length(sequence: Sequence) -> int:
    """Positions for the draft worker to keep. To draft, it runs at least the last token."""
    return min(sequence.draft.num_cached_tokens, len(sequence.token_ids) - 1)


def _item(drafts: Drafts, num_tokens: int, max_length: int) -> ProposeItem:
    """The item that sends `num_tokens` committed tokens, and asks for drafts if none are missing then."""
    sequence, plan = drafts.sequence, drafts.plan
    base, length = _base_length(sequence), len(sequence.token_ids)
    item = ProposeItem(sequence.sequence_id, base, tuple(sequence.token_ids[base : base + num_tokens]))
    if not base:  # the draft worker finds the pages of earlier rows by itself
        item.sampling, item.cache_namespace = SamplingParams(prompt_length=sequence.prompt_length), CACHE_NAMESPACE
    if item.end == length and sequence.is_decoding:
        item.num_draft_tokens = min(drafts.num_draft_tokens, max_length - length)
        item.min_chance, item.next_chance = plan.min_chance, plan.next_chance
    return item


def _pass_rows(items: list[ProposeItem], proposals: list[Proposal]) -> list[int]:
    """Rows of each pass that the draft worker ran for these items."""
    lengths = [len(proposal.draft_token_ids) for proposal in proposals]
    later = [sum(length > step for length in lengths) for step in range(1, max(lengths, default=0))]
    return [sum(len(item.token_ids) for item in items), *later]
