"""Drafting for targets with another tokenizer, by translating rounds into the draft's tokens.

The draft model sees only its own tokens. It drafts greedily, because sampling parameters refer to the target's tokens.
Positions on the wire count the target's tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from draft_worker.proposer import Proposer
from draft_worker.translation.sequence import TranslatedSequence
from draft_worker.translation.translation import Translation
from draft_worker.translation.translations import Translations
from specpool.engine.cache.slots import SequenceKey
from specpool.engine.run.engine import Engine
from specpool.engine.sampling.lexers import common_length
from specpool.protocol.errors import InvalidArgumentError
from specpool.protocol.rounds import ItemStatus, Proposal, ProposeItem, ProposeRound, RoundLimits


class _Part(NamedTuple):
    """An item of a translated round: the state of the sequence, and the item in the draft's tokens."""

    sequence: TranslatedSequence
    item: ProposeItem


class TranslatingProposer(Proposer):
    """Serves rounds in the draft's own tokens and in tokens of other tokenizers."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.translations = Translations(engine.loaded.tokenizer, engine.vocab_size)

    def limits_of(self, translation_id: str) -> RoundLimits:
        """Return the limits for the items of a round. Any thread. Raises NotFoundError for an unknown translation."""
        if not translation_id:
            return self.limits
        return replace(self.limits, vocab_size=self.translations.get(translation_id).vocab_size)

    def expire(self, now: float, lease_seconds: float) -> int:
        self.translations.expire()
        return super().expire(now, lease_seconds)

    def serve(self, rounds: Sequence[ProposeRound]) -> list[list[Proposal]]:
        """Draft for rounds of different coordinators in shared forward passes. Each round has its own tokens."""
        plans = [self._plan(round_) for round_ in rounds]
        proposed = self.propose(
            [
                round_ if parts is None else replace(round_, items=[part.item for part in parts.values()])
                for round_, parts in zip(rounds, plans, strict=True)
            ]
        )
        return [
            own if parts is None else self._translated(round_, parts, own)
            for round_, parts, own in zip(rounds, plans, proposed, strict=True)
        ]

    def _plan(self, round_: ProposeRound) -> dict[int, _Part] | None:
        """Return the parts of a round by sequence id, without cache misses; None if the round needs no translation."""
        if not round_.translation_id:
            return None
        translation = self.translations.get(round_.translation_id)
        parts = {}
        for index, item in enumerate(round_.items):
            if item.end > (maximum := self.engine.max_model_len):
                reason = f"needs {item.end} positions, more than the maximum of {maximum}"
                raise InvalidArgumentError(f"items[{index}]", reason)
            key = (round_.coordinator_id, item.sequence_id)
            if not self.engine.slots.is_stale(key, round_.round_id):
                sequence = self._sequence(key, item, translation)
                if sequence is not None and sequence.extend(item.base_length, item.token_ids):
                    parts[item.sequence_id] = _Part(sequence, self._item(key, item, sequence))
        return parts

    def _sequence(self, key: SequenceKey, item: ProposeItem, translation: Translation) -> TranslatedSequence | None:
        """Return the state of a sequence; None if it is lost."""
        if not item.base_length:
            return TranslatedSequence(translation, self.engine.max_model_len)
        slot = self.engine.slots.find(key)
        sequence: TranslatedSequence | None = None if slot is None else slot.translated
        return sequence if sequence is not None and sequence.translation is translation else None

    def _item(self, key: SequenceKey, item: ProposeItem, sequence: TranslatedSequence) -> ProposeItem:
        """Return the item that updates the draft's cache to the translated sequence.

        A sequence that has outgrown the draft gets no drafts. Its item only runs one cached token again.
        """
        token_ids = sequence.draft_ids or [0]  # an item needs at least one token
        slot, end = self.engine.slots.find(key) if item.base_length else None, len(token_ids)
        base = 0 if slot is None else common_length(token_ids, slot.token_ids[: slot.num_cached_tokens])
        base, room = min(base, end - 1), self.engine.max_model_len - end
        if room < 0:
            base, end = max(0, base - 1), max(1, base)
        base = base if slot is None else self.engine.slots.reach(slot, base)
        num_draft_tokens = min(room, sequence.translation.num_draft_tokens(item.num_draft_tokens))
        return ProposeItem(
            item.sequence_id,
            base,
            tuple(token_ids[base:end]),
            cache_namespace=item.cache_namespace if slot is None else slot.cache_namespace,
            expected_prefix_length=0 if base else self._expected_prefix(item, sequence, end),
            num_draft_tokens=max(0, num_draft_tokens),
            min_chance=item.min_chance,
            next_chance=item.next_chance,
        )

    def _expected_prefix(self, item: ProposeItem, sequence: TranslatedSequence, end: int) -> int:
        """Return how many of the draft's `end` tokens the prefix cache must hold, in whole pages."""
        if not item.expected_prefix_length:
            return 0
        size = self.engine.slots.tables.page_size
        return min(sequence.num_draft_ids(item.expected_prefix_length), end - 1) // size * size

    def _translated(
        self, round_: ProposeRound, parts: dict[int, _Part], proposed: Iterable[Proposal]
    ) -> list[Proposal]:
        """Return the proposals of a translated round, in item order."""
        found = {proposal.sequence_id: proposal for proposal in proposed}
        answers = []
        for item in round_.items:
            key, proposal = (round_.coordinator_id, item.sequence_id), found.get(item.sequence_id)
            if proposal is None:
                stale = self.engine.slots.is_stale(key, round_.round_id)
                answers.append(Proposal(item.sequence_id, ItemStatus.STALE_ROUND if stale else ItemStatus.CACHE_MISS))
            elif proposal.status is not ItemStatus.OK:
                answers.append(proposal)
            else:
                answers.append(self._proposal_of(key, item, parts[item.sequence_id].sequence, proposal))
        return answers

    def _proposal_of(
        self, key: SequenceKey, item: ProposeItem, sequence: TranslatedSequence, proposal: Proposal
    ) -> Proposal:
        token_ids, chances = sequence.translation.proposal(
            proposal.draft_token_ids, proposal.confidences, item.num_draft_tokens, sequence.incomplete
        )
        length = len(sequence.target_ids)
        sequence.extend(length, token_ids[:-1])
        self.engine.slots[key].translated = sequence
        num_cached_tokens = length + max(0, len(token_ids) - 1)
        return Proposal(item.sequence_id, ItemStatus.OK, token_ids, num_cached_tokens, chances)
