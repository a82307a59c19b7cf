"""What a worker has cached of a sequence, and the rounds in flight that will change it. Pure.

Rounds and windows report events. Only this module changes the numbers.
"""

from dataclasses import dataclass

from coordinator.scheduling.features import FeatureStore
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

    @property
    def max_gain(self) -> int:
        """Maximum number of tokens that it yields."""
        return self.item.max_num_draft_tokens + 1 if self.num_cached_tokens is None else 0


class WorkerCache:
    """A sequence's KV cache in one worker, as far as the worker's answers tell."""

    def __init__(self, sequence_id: int, num_cached_tokens: int = 0) -> None:
        self.sequence_id = sequence_id
        self.num_cached_tokens = num_cached_tokens
        self.source: WorkerCache | None = None
        """Cache to copy the first positions from. None once they are copied or lost."""
        self._shared_length = 0
        """Positions to copy from `source`, once it has cached them."""
        self.pending: list[PendingRound] = []
        """Rounds that the worker has not answered, at most one ahead of the one that runs."""
        self.features: FeatureStore | None = None
        """Hidden states for a draft that reads them."""
        self.had_no_slot = False
        """Whether the worker had no free slot in the last round."""
        self.lacks_room = False
        """Whether the worker could not enlarge the reservation."""
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
        """Positions for the worker to keep, initially those of `source`. Unknown if it `continues`."""
        if self.pending and self.pending[-1].num_cached_tokens is not None:
            return self.pending[-1].num_cached_tokens
        shared = min(self._shared_length, self.source.num_cached_tokens) if self.source is not None else 0
        return self.num_cached_tokens or shared

    @property
    def max_pending_gain(self) -> int:
        """Maximum number of tokens that pending rounds yield."""
        return sum(pending.max_gain for pending in self.pending)

    def num_recomputed(self, length: int) -> int:
        """Positions cached without states that have arrived since, for a sequence of `length` tokens."""
        if self.features is None or not self.features.is_due(length):
            return 0
        return max(0, self.base_length - self.features.first_unread - 1)

    def copy_from(self, source: "WorkerCache", length: int) -> None:
        """Let the worker copy `length` positions from another cache, as far as that one has them."""
        self.source, self._shared_length = source, length

    def copy_nothing(self) -> None:
        """Let the worker compute all positions."""
        self.source = None

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

    def commit(self, num_cached_tokens: int) -> None:
        """Record that the worker has cached exactly the first `num_cached_tokens` positions."""
        self.num_cached_tokens, self.source = num_cached_tokens, None

    def miss(self, *, keeps_source: bool = False) -> None:
        """Record that the worker has nothing cached. `keeps_source`: whether the shared positions are still there."""
        self.num_cached_tokens = 0
        self.source = self.source if keeps_source else None
        if self.features is not None:
            self.features.mark_lost()

    def refuse_room(self) -> None:
        """Record that the worker could not enlarge the reservation. The cache is intact."""
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
        """Forget all positions, including those of `source`: another process has replaced the worker."""
        self.num_cached_tokens = 0
        self.pending.clear()
        if self.source is not None:
            self.source.num_cached_tokens = 0

    def release(self) -> None:
        """Forget everything: the worker is about to free the slot."""
        self.num_cached_tokens = self.backoff_until = 0
        self.source = self.features = None
        self.pending.clear()

    def snapshot(self) -> "WorkerCache":
        """Return a copy that keeps its positions when this cache is released."""
        return WorkerCache(self.sequence_id, self.num_cached_tokens)
