"""What a round asks a draft worker, or the carried draft, to draft for one sequence. Pure."""

from functools import cached_property

from coordinator.scheduling.sequence import Sequence
from specpool.drafting.plans import DraftPlan
from specpool.protocol.rounds import MAX_ITEM_UNVERIFIED, OwnDraftItem, ProposeItem
from specpool.protocol.worker_info import WorkerInfo


class DraftItems:
    """Builds the items that request drafts for one sequence in one round."""

    def __init__(self, sequence: Sequence, plan: DraftPlan, round_id: int, own_draft: WorkerInfo | None) -> None:
        """`own_draft`: the draft that the target worker carries."""
        self.sequence, self.plan, self.own_draft = sequence, plan, own_draft
        self._round_id = round_id
        self._read_end = 0
        """Number of tokens whose states this round sends to the draft worker."""
        self._num_branches = 0
        """Branches requested from the draft worker."""

    # --- The draft worker

    @property
    def wants_drafts(self) -> bool:
        """Whether the draft worker is to draft for the sequence, or to follow its prompt."""
        return self.plan.num_draft_tokens > 0 and self.own_draft is None

    @property
    def drafts_ahead(self) -> bool:
        """Whether the draft worker is to draft branches during the verification."""
        return self.plan.num_branches > 0

    @property
    def _limit(self) -> int:
        return min(self.plan.num_draft_tokens, self.sequence.max_num_draft_tokens)

    @property
    def _base_length(self) -> int:
        """Positions for the draft worker to keep."""
        # After branches, all tokens may be cached. The last one must run again for its logits.
        return min(self.sequence.draft_base_length, len(self.sequence.token_ids) - 1)

    def _start(self, worker: WorkerInfo) -> int:
        """Return the position of the first token that the draft worker must run if the prediction holds."""
        return self.sequence.draft.start_after(self._base_length, worker.kv_positions_multiple)

    def catchup(self, worker: WorkerInfo) -> int:
        """Return the number of committed tokens that the draft worker must run; 0 to leave the sequence out."""
        sequence, length = self.sequence, len(self.sequence.token_ids)
        if self._limit <= 0 or length >= worker.max_model_len or self._round_id < sequence.draft.backoff_until:
            return 0
        if sequence.target.had_no_slot:  # leave the draft worker's slots to sequences that the target worker serves
            return 0
        if not sequence.is_decoding and sequence.draft_base_length == length:
            return 0
        return length - self._start(worker)

    def propose_item(self, count: int, worker: WorkerInfo) -> ProposeItem | None:
        """Return the item that runs `count` committed tokens and drafts; None to leave the sequence out."""
        if (item := self._item(count, (), worker)) is None:
            return None
        if item.end == len(self.sequence.token_ids) and self.sequence.is_decoding:
            item.num_draft_tokens = min(self._limit, worker.max_model_len - item.end)
            item.min_chance = self.plan.min_chance if item.num_draft_tokens else 0.0
            item.next_chance = self.plan.next_chance
        return item

    def ahead_item(self, count: int, verified: tuple[int, ...] | None, worker: WorkerInfo) -> ProposeItem | None:
        """Return the item that runs `count` committed tokens and drafts branches; None to leave the sequence out.

        `verified`: draft tokens in verification; None if the verification yields no tokens.
        """
        length = len(self.sequence.token_ids)
        unverified = verified or ()
        num_draft_tokens = min(self._limit, worker.max_model_len - length - len(unverified) - 1)
        num_branches = min(self.plan.num_branches, worker.max_branches)
        is_caught_up = self._start(worker) + count == length
        may_branch = num_branches and verified is not None and is_caught_up and len(unverified) <= MAX_ITEM_UNVERIFIED
        if not may_branch or num_draft_tokens <= 0:
            return self._item(count, (), worker)
        if (item := self._item(count, unverified, worker)) is not None:
            item.num_branches = self._num_branches = num_branches
            item.num_unverified = len(unverified)
            item.num_draft_tokens, item.min_chance = num_draft_tokens, self.plan.min_chance
        return item

    def _item(self, count: int, unverified: tuple[int, ...], worker: WorkerInfo) -> ProposeItem | None:
        """The item that extends the draft worker's cache, without draft tokens; None to leave the sequence out."""
        sequence, base, start = self.sequence, self._base_length, self._start(worker)
        tokens = tuple(sequence.token_ids[base : start + count] if count else ())
        # The target's output head can be larger than the draft's, and yield tokens outside the draft's vocabulary.
        if not tokens or max(tokens + unverified) >= worker.vocab_size:
            return None
        end, features, states = base + len(tokens), b"", sequence.draft.features
        if states is not None and states.spec == worker.features and states.is_due(len(sequence.token_ids)):
            features, self._read_end = states.before(start, end), end
        return ProposeItem(
            sequence_id=sequence.sequence_id,
            base_length=base,
            token_ids=tokens + unverified,
            sampling=None if base else sequence.request.worker_sampling,
            cache_namespace=None if base else sequence.cache_namespace,
            expected_prefix_length=start - base,
            features=features,
        )

    # --- The draft that the target worker carries

    @cached_property
    def _num_own_tokens(self) -> int:
        if self.own_draft is None:
            return 0
        return max(0, min(self.plan.num_draft_tokens, self.sequence.max_num_own_draft_tokens))

    def own_item(self, *, may_verify: bool, keeps_states: bool) -> OwnDraftItem | None:
        """Return what the carried draft is to do; None: nothing.

        `may_verify`: whether the round decodes. `keeps_states`: whether later drafts read this round's states.
        """
        sequence, plan, k = self.sequence, self.plan, self._num_own_tokens
        if self.own_draft is None or not (k or keeps_states):
            return None
        return OwnDraftItem(
            max_verified=k if may_verify else 0,
            num_draft_tokens=k if plan.drafts_next else 0,
            max_length=sequence.max_length - 1,  # the last token comes from the target
            min_chance=plan.min_chance,
            next_chance=plan.next_chance,
        )
