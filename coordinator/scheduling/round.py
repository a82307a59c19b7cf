"""One round of one group: propose -> verify -> commit. Pure: builds requests to the workers and applies the responses.

The command is the same in every state: keep `base_length` cached positions, then append committed tokens. A new prompt,
a lagging draft worker and a lost cache differ only in the number of tokens to append. Long catch-ups are chunked, so
that they never stall decoding sequences.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from types import MappingProxyType

from coordinator.scheduling.commits import Commit
from coordinator.scheduling.drafts import Drafts
from coordinator.scheduling.features import limit_propose_items, limit_verify_items
from coordinator.scheduling.prefill import Catchup, share_prefill, timely_budget, with_short_background
from coordinator.scheduling.sequence import Sequence
from coordinator.scheduling.verification import Verification
from specpool.drafting.draft_models import DraftModel
from specpool.drafting.plans import DraftPlan
from specpool.protocol.features import WantedFeatures
from specpool.protocol.rounds import Proposal, ProposeItem, Verdict, VerifyItem
from specpool.protocol.worker_info import WorkerInfo

Limits = Callable[[DraftModel | None], WorkerInfo | None]
"""Returns the limits of a draft model's ready workers. None if no worker is ready or the model is None."""


class Round:
    """The drafts and verifications of a group."""

    def __init__(
        self,
        round_id: int,
        group: Items[Sequence],
        prefill_tokens: int,
        plans: Mapping[int, DraftPlan] = MappingProxyType({}),
        chance: Callable[[float], float] = float,
        pass_seconds: Callable[[int], float] | None = None,
        features: WantedFeatures | None = None,
        own_draft: WorkerInfo | None = None,
    ) -> None:
        """`prefill_tokens`: budget of each worker for long catch-ups. `chance`: acceptance by draft probability.

        `plans`: by sequence id. Without a plan, the model drafts as many tokens as the request allows.
        `pass_seconds`: seconds of the target worker's pass by rows, which limit prefill; None: no limit.
        `features`: hidden states that the draft worker reads. `own_draft`: the draft that the target worker carries.
        """
        self.round_id, self.features = round_id, features
        self._prefill_tokens, self._pass_seconds = prefill_tokens, pass_seconds
        self._drafts: dict[int, Drafts] = {}
        self._verifications: dict[int, Verification] = {}
        for sequence in group:
            plan = plans.get(sequence.sequence_id) or DraftPlan(sequence.max_num_draft_tokens)
            drafts = self._drafts[sequence.sequence_id] = Drafts(sequence, plan, round_id, chance, own_draft)
            self._verifications[sequence.sequence_id] = Verification(drafts, round_id, features)

    @property
    def cache_misses(self) -> int:
        return sum(each.cache_misses + each.drafts.cache_misses for each in self._verifications.values())

    @property
    def is_trial(self) -> bool:
        """Whether the round is a trial of its draft method."""
        return any(drafts.plan.is_trial for drafts in self._drafts.values())

    @property
    def wants_drafts(self) -> bool:
        """Whether the draft worker is to draft for a sequence, or to follow its prompt."""
        return any(drafts.wants_drafts for drafts in self._drafts.values())

    @property
    def drafts_ahead(self) -> bool:
        """Whether the draft worker drafts during the verification, instead of before it."""
        return any(drafts.drafts_ahead for drafts in self._drafts.values())

    # --- Propose

    @property
    def models(self) -> dict[int, DraftModel | None]:
        """The draft model of each sequence."""
        return {i: drafts.sequence.draft.model for i, drafts in self._drafts.items()}

    def propose_items(self, limits: Limits) -> list[ProposeItem]:
        """Return the items for drafting before the verification."""
        return self._draft_items(limits, lambda drafts, count, worker: drafts.propose_item(count, worker))

    def ahead_items(self, limits: Limits) -> list[ProposeItem]:
        """Return the items for drafting branches during the verification. Call after `verify_items`."""

        def build(drafts: Drafts, count: int, worker: WorkerInfo) -> ProposeItem | None:
            verified = self._verifications[drafts.sequence.sequence_id].unverified_ids
            return drafts.ahead_item(count, verified, worker)

        return self._draft_items(limits, build)

    def _draft_items(
        self, limits: Limits, build: Callable[[Drafts, int, WorkerInfo], ProposeItem | None]
    ) -> list[ProposeItem]:
        workers: dict[Drafts, WorkerInfo] = {}
        for drafts in self._drafts.values():
            if drafts.sequence.finish is None and (worker := limits(drafts.sequence.draft.model)) is not None:
                workers[drafts] = worker
        missing = {drafts: count for drafts, worker in workers.items() if (count := drafts.catchup(worker))}
        # Tokens that are recomputed with their states are no prefill, which would wait for other sequences.
        recomputed = {drafts: drafts.sequence.num_recomputed for drafts in missing}
        catchups = [(drafts.sequence, max(1, count - recomputed[drafts])) for drafts, count in missing.items()]
        shares = self._shares(catchups, num_draft_tokens=0)
        counts = {
            drafts: min(count, share + recomputed[drafts])
            for drafts, count in missing.items()
            if (share := shares.get(drafts.sequence.sequence_id, 0))
        }
        built = (build(drafts, counts.get(drafts, 0), worker) for drafts, worker in workers.items())
        items = [item for item in built if item is not None]
        if self.features is not None:
            limit_propose_items(items)
        return items

    def take_branches(self, target_selects: bool = True) -> None:
        """Take the branches that match the last verification, or all while its outcome is unknown.

        No sequence waits for the drafts of another. `target_selects`: whether the target worker can select branches.
        """
        for drafts in self._drafts.values():
            if drafts.sequence.finish is None:
                drafts.take_branches(target_selects)

    def take_proposals(self, proposals: Items[Proposal], target_vocab_size: int) -> None:
        """Take the draft tokens before the first one outside the target's vocabulary."""
        for proposal in proposals:
            self._drafts[proposal.sequence_id].take_proposal(proposal, target_vocab_size)

    def take_ahead(self, proposals: Items[Proposal], target_vocab_size: int) -> None:
        """Take the branches drafted during the verification, before the round commits."""
        for proposal in proposals:
            branches = self._drafts[proposal.sequence_id].take_ahead(proposal, target_vocab_size)
            pending = self._verifications[proposal.sequence_id].pending
            if branches and pending is not None:
                pending.branches = branches

    # --- Verify and commit

    def verify_items(self) -> list[VerifyItem]:
        """Items for the target worker. Skips sequences aborted during the draft round."""
        unfinished = [each for each in self._verifications.values() if each.sequence.finish is None]
        num_draft_tokens = sum(each.drafts.max_num_tokens for each in unfinished)
        shares = self._shares([(each.sequence, each.catchup) for each in unfinished], num_draft_tokens)
        items = []
        for each in unfinished:
            count = shares[each.sequence.sequence_id]
            each.sequence.prefill_waits = 0 if count else each.sequence.prefill_waits + 1
            if count:
                items.append(each.item(count))
        if self.features is not None:
            limit_verify_items(items, self.features)
        return items

    def complete_items(self) -> None:
        """Fill in position, last token and draft tokens of continued items, once the rounds before have committed."""
        for each in self._verifications.values():
            each.complete()

    def discard(self) -> None:
        """Drop the round, and those that continue its sequences, after a failure."""
        for each in self._verifications.values():
            each.discard()

    def commit(self, verdicts: Items[Verdict]) -> list[Commit]:
        """Apply the verdicts. Return a commit for each sequence that gained tokens."""
        commits = (self._verifications[verdict.sequence_id].take_verdict(verdict) for verdict in verdicts)
        return [commit for commit in commits if commit is not None]

    def _shares(self, catchups: Items[Catchup], num_draft_tokens: int) -> dict[int, int]:
        """Tokens of each sequence, by id, to send to a worker."""
        budget, catchups = self._prefill_tokens, with_short_background(catchups)
        if self._pass_seconds is not None:
            budget = timely_budget(catchups, num_draft_tokens, budget, self._pass_seconds)
        return share_prefill(catchups, budget)
