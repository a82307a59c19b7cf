"""Cached positions of a sequence in a worker, and the rounds in flight that will change them. Pure.

Rounds and windows report events. Only this module changes the numbers.
"""

from dataclasses import dataclass
from functools import cached_property

from coordinator.scheduling.features import FeatureStore
from specpool.drafting.draft_models import DraftModel
from specpool.protocol.features import WantedFeatures
from specpool.protocol.rounds import Branch, VerifyItem


@dataclass(eq=False)
class PendingRound:
    """A round of a sequence that the target worker has not answered."""

    round_id: int
    item: VerifyItem
    num_cached_tokens: int | None
    """Positions cached after a prompt chunk. None: the round yields tokens, so its result decides."""
    branches: tuple[Branch, ...] = ()
    """Draft tokens for the next round, by outcome of this one."""

    @cached_property
    def max_gain(self) -> int:
        """Maximum number of tokens that it yields, whatever the outcome of the round before it."""
        return self.item.max_num_draft_tokens + 1 if self.num_cached_tokens is None else 0


class WorkerCache:
    """A sequence's KV cache in one worker, as far as the worker's answers tell."""

    def __init__(self) -> None:
        self.model: DraftModel | None = None
        """The sequence's draft model while it has a ready worker. None for the target worker's cache."""
        self.num_cached_tokens = 0
        self.reusable_length: int | None = None
        """Number of leading tokens after which other sequences can continue. None: they can after every full page."""
        self.predicted = 0
        """Predicted number of leading tokens in the worker's prefix cache."""
        self.fork = 0
        """Number of leading tokens after which the worker should keep the states of recurrent layers; 0: none."""
        self.is_mispredicted = False
        """Whether the last prediction was wrong and has not been replaced yet."""
        self.pending: list[PendingRound] = []
        """Rounds that the worker has not answered, at most one ahead of the one that runs."""
        self.features: FeatureStore | None = None
        """Hidden states for a draft that reads them."""
        self.had_no_slot = False
        """Whether the worker had no free slot in the last round."""
        self.lacks_room = False
        """Whether the worker had too few free pages for the sequence to grow."""
        self.backoff_until = 0
        """First round that may use the worker again after it had no free slot."""

    @property
    def continues(self) -> bool:
        """Whether the result of a pending round decides where the next one begins."""
        return bool(self.pending) and self.pending[-1].num_cached_tokens is None

    @property
    def expected_length(self) -> int | None:
        """Positions cached once all pending rounds are answered. None if it `continues`."""
        return self.pending[-1].num_cached_tokens if self.pending else self.num_cached_tokens

    @property
    def base_length(self) -> int:
        """Positions for the worker to keep. Unknown if it `continues`."""
        if self.pending and self.pending[-1].num_cached_tokens is not None:
            return self.pending[-1].num_cached_tokens
        return self.num_cached_tokens

    @property
    def start(self) -> int:
        """Position of the first token that the worker must run if the prediction holds."""
        return max(self.base_length, self.predicted)

    def start_after(self, base_length: int, page_size: int = 1) -> int:
        """Position of the first token that a draft worker must run if the prediction holds.

        After first contact, `base_length` counts: it may lie before the prediction. `page_size`: of the draft worker.
        """
        return base_length or self.predicted // max(1, page_size) * max(1, page_size)

    @property
    def max_pending_gain(self) -> int:
        """Maximum number of tokens that pending rounds yield."""
        return sum(pending.max_gain for pending in self.pending)

    @property
    def likely_pending_gain(self) -> int:
        """Tokens that pending rounds yield if all of their known draft tokens are accepted."""
        return sum(len(each.item.draft_token_ids) + 1 for each in self.pending if each.num_cached_tokens is None)

    @property
    def min_pending_gain(self) -> int:
        """Minimum number of tokens that pending rounds yield."""
        return sum(pending.num_cached_tokens is None for pending in self.pending)

    def num_recomputed(self, length: int) -> int:
        """Positions cached without states that have arrived since, for a sequence of `length` tokens."""
        if self.features is None or not self.features.is_due(length):
            return 0
        return max(0, self.base_length - self.features.first_unread - 1)

    def send(self, pending: PendingRound) -> None:
        """Record a round that is about to be sent to the worker."""
        self.pending.append(pending)

    def awaits(self, pending: PendingRound | None) -> bool:
        """Whether the worker answers this round next. Otherwise its result is dropped."""
        return self.pending[:1] == [pending]

    def discard(self, pending: PendingRound | None) -> None:
        """Drop a round and those that continue it, without a result."""
        if pending in self.pending:
            del self.pending[self.pending.index(pending) :]

    def discard_all(self) -> None:
        """Drop the results of all pending rounds."""
        self.pending.clear()

    def answer(self, *, had_no_slot: bool = False) -> None:
        """Record that the oldest pending round is answered."""
        self.pending.pop(0)
        self.had_no_slot = had_no_slot

    def commit(self, num_cached_tokens: int, reusable_length: int | None = None) -> None:
        """Record that the worker has cached exactly the first `num_cached_tokens` positions."""
        self.num_cached_tokens, self.reusable_length = num_cached_tokens, reusable_length

    def mispredict(self) -> None:
        """Record that the prefix cache holds fewer tokens than predicted. The sequence's own cache is intact."""
        self.predicted, self.is_mispredicted = 0, True

    def miss(self) -> None:
        """Record that the worker has nothing cached."""
        self.num_cached_tokens = self.predicted = 0
        if self.features is not None:
            self.features.mark_lost()

    def refuse_room(self) -> None:
        """Record that the worker had too few free pages. The cache is intact."""
        self.lacks_room = True

    def settle_room(self) -> bool:
        """Return whether the worker refused room, and forget it."""
        lacked, self.lacks_room = self.lacks_room, False
        return lacked

    def back_off(self, until: int) -> None:
        """Leave the worker alone until this round."""
        self.backoff_until = until

    def add_features(self, features: bytes, end: int, wanted: WantedFeatures) -> None:
        """Keep the states of the last positions before `end`, for the worker to read."""
        if self.features is None or self.features.spec != wanted.spec:
            self.features = FeatureStore(wanted)
        self.features.add(features, end)

    def drop_features(self) -> None:
        """Free the states: the sequence has ended."""
        self.features = None

    def replace_worker(self) -> None:
        """Forget all positions, because another process has replaced the worker."""
        self.num_cached_tokens = self.predicted = 0
        self.pending.clear()

    def release(self) -> None:
        """Forget everything: the worker is about to free the slot."""
        self.num_cached_tokens = self.predicted = self.backoff_until = 0
        self.features = None
        self.pending.clear()
