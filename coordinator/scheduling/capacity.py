"""Admission limits: KV capacity of the target worker, and the size of the queue. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from coordinator.scheduling.fair_queue import FairQueue
from coordinator.scheduling.sequence import Sequence

# Positions that a sequence reserves beyond those of its next round: by default, and 1/GROWTH of its length.
HEADROOM, GROWTH = 256, 4
# Tokens that a preempted sequence gains before it is preempted for positions again: at least, and by its length.
MIN_PROGRESS, PROGRESS_SHARE = 64, 16


def protected_tokens(length: int) -> int:
    """Tokens that a sequence of this length gains before it is preempted again. It reserves room for them at once."""
    return max(MIN_PROGRESS, length // PROGRESS_SHARE)


class DuplicateRequestError(Exception):
    """The client already has a request with this id in flight."""


class QueueLimitError(Exception):
    """The queue refuses a request. `places`: number of sequences that must end first."""

    def __init__(self, reason: str, places: int) -> None:
        super().__init__(reason)
        self.places = places


@dataclass(frozen=True)
class KVCapacity:
    """Positions that the target worker can cache, over all sequences."""

    positions: int = 0
    """0: unlimited."""
    multiple: int = 1
    """Each sequence reserves a multiple of this many positions."""
    grows: bool = False
    """Whether reservations can grow. Otherwise a sequence reserves all that it can need when it enters."""

    def needed_by(self, sequence: Sequence) -> int:
        """Positions to reserve for a sequence that enters the window."""
        if not self.grows:
            return self._rounded(sequence, sequence.max_length)
        return self._rounded(sequence, sequence.next_length + protected_tokens(len(sequence.token_ids)))

    def wanted_by(self, sequence: Sequence, reserved: int, free: int) -> int:
        """Positions to reserve instead of `reserved`, of which some are needed, if `free` more are left.

        They grow by a share of the length, so that the worker seldom moves a sequence.
        """
        headroom = min(max(HEADROOM, len(sequence.token_ids) // GROWTH), free // 8)
        wanted = self._rounded(sequence, sequence.next_length + headroom)
        return max(self.needed_by(sequence), min(wanted, reserved + free // self._unit * self._unit))

    @property
    def _unit(self) -> int:
        return max(1, self.multiple)

    def _rounded(self, sequence: Sequence, length: int) -> int:
        return -(-min(sequence.max_length, length) // self._unit) * self._unit


class Reservations:
    """KV positions reserved for each sequence that holds a place in the window."""

    def __init__(self) -> None:
        self.capacity = KVCapacity()
        self._positions: dict[int, int] = {}
        self._reserved = 0

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, sequence_id: int) -> int:
        return self._positions[sequence_id]

    @property
    def is_limited(self) -> bool:
        return self.capacity.positions > 0

    @property
    def free(self) -> int:
        """Unreserved positions, if they are limited."""
        return max(0, self.capacity.positions - self._reserved)

    def add(self, sequence: Sequence) -> None:
        self._positions[sequence.sequence_id] = 0
        self._reserve(sequence)

    def grow(self, sequence: Sequence) -> bool:
        """Reserve the positions of the sequence's next round. Returns False if there are too few."""
        missing = self.missing(sequence)
        if missing > self.free and len(self) > 1:
            return False
        if missing:
            self._reserve(sequence)
        return True

    def missing(self, sequence: Sequence) -> int:
        """Positions that the sequence lacks for its next round, with some headroom."""
        reserved = self._positions[sequence.sequence_id]
        if sequence.reserved is None or sequence.next_length <= min(reserved, sequence.reserved):
            return 0
        return max(0, self.capacity.needed_by(sequence) - reserved)

    def _reserve(self, sequence: Sequence) -> None:
        before = self._positions[sequence.sequence_id]
        if self.is_limited and self.capacity.grows:
            sequence.reserved = positions = self.capacity.wanted_by(sequence, before, self.free)
        else:
            sequence.reserved, positions = None, self.capacity.needed_by(sequence)
        self._positions[sequence.sequence_id] = positions
        self._reserved += positions - before

    def remove(self, sequence_id: int) -> None:
        self._reserved -= self._positions.pop(sequence_id)

    def usage(self, slots: int) -> float:
        """Reserved share of the KV cache, 0 to 1. `slots`: slots of the target worker."""
        if self.is_limited:
            return self._reserved / self.capacity.positions
        return len(self) / slots

    def count_fitting(self, waiting: Iterable[Sequence], places: int) -> int:
        """Number of `waiting` sequences, in order, that fit into `places`. An empty cache always fits the first."""
        limit = self.capacity.positions if places else 0
        count, reserved = 0, self._reserved
        for sequence in islice(waiting, places):
            reserved += self.capacity.needed_by(sequence) if limit else 0
            if (self._positions or count) and 0 < limit < reserved:
                break
            count += 1
        return count

    def check_integrity(self, sequence_ids: set[int]) -> None:
        """Raise AssertionError unless exactly these sequences hold positions, within the capacity."""
        assert set(self._positions) == sequence_ids, "positions are reserved outside the window"
        assert self._reserved == sum(self._positions.values()), "reserved positions are miscounted"
        assert len(self) < 2 or not self.is_limited or self.usage(1) <= 1, "the KV cache is exceeded"


@dataclass(frozen=True)
class QueueLimits:
    """Limits of the queue. A client with few samples in it may exceed limits that other clients have exhausted."""

    samples: int
    """Maximum number of samples that wait."""
    tokens: int | None = None
    """Maximum number of prompt tokens that wait, unless a single request waits; None: unlimited."""
    per_client: int | None = None
    """Maximum number of samples of one client, waiting and in the window; None: unlimited."""

    def check(
        self,
        queue: FairQueue,
        client: str,
        samples: int,
        tokens: int,
        *,
        entering: int,
        reserve: int,
        preempted: int = 0,
    ) -> None:
        """Raise QueueLimitError if the queue cannot take a request of this size.

        `tokens`: prompt tokens of all samples together. `entering`: sequences, queued or new, that enter the window at
        once. `preempted`: preempted sequences of the client. `reserve`: extra samples for clients with an
        empty queue, or at most their share of the reserve in it, so that no client locks others out. The reserve is at
        most the limit itself; the token limit doubles.
        """
        in_flight = queue.waiting_of(client) + queue.running_of(client) + preempted
        if self.per_client is not None and in_flight + samples > self.per_client:
            reason = f"{in_flight} samples of this client are in flight, of at most {self.per_client}"
            raise QueueLimitError(reason, in_flight + samples - self.per_client)
        waiting = queue.newcomers + samples - entering
        own = queue.waiting_of(client)
        fair = min(reserve, self.samples) // queue.waiting_clients if own else self.samples
        has_reserve = own + samples - entering <= fair
        max_samples = self.samples + (min(reserve, self.samples) if has_reserve else 0)
        if waiting > max_samples:
            raise QueueLimitError(f"the queue is full ({len(queue)} samples wait)", waiting - max_samples)
        max_tokens = (self.tokens or 0) * (1 + has_reserve)
        if self.tokens is not None and waiting > 0 and len(queue) and queue.tokens + tokens > max_tokens:
            reason = f"the queue is full ({queue.tokens} prompt tokens wait, of at most {self.tokens})"
            excess = queue.tokens + tokens - max_tokens
            raise QueueLimitError(reason, -(-excess * len(queue) // queue.tokens))
