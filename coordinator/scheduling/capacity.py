"""Admission limits: KV capacity of the target worker, and the size of the queue. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from coordinator.scheduling.fair_queue import FairQueue
from coordinator.scheduling.sequence import Sequence


class DuplicateRequestError(Exception):
    """The client already has a request with this id in flight."""


class PoolFullError(Exception):
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

    def needed_by(self, sequence: Sequence) -> int:
        multiple = max(1, self.multiple)
        return -(-sequence.max_length // multiple) * multiple


class Reservations:
    """KV positions reserved for each sequence that holds a place in the window."""

    def __init__(self) -> None:
        self.capacity = KVCapacity()
        self._positions: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._positions)

    def add(self, sequence: Sequence) -> None:
        self._positions[sequence.sequence_id] = self.capacity.needed_by(sequence)

    def remove(self, sequence_id: int) -> None:
        del self._positions[sequence_id]

    def usage(self, slots: int) -> float:
        """Reserved share of the KV cache, 0 to 1. `slots`: slots of the target worker."""
        if self.capacity.positions:
            return sum(self._positions.values()) / self.capacity.positions
        return len(self) / slots

    def count_fitting(self, waiting: Iterable[Sequence], places: int) -> int:
        """Number of `waiting` sequences, in order, that fit into `places`. An empty cache always fits the first."""
        limit = self.capacity.positions if places else 0
        count, reserved = 0, sum(self._positions.values()) if limit else 0
        for sequence in islice(waiting, places):
            reserved += self.capacity.needed_by(sequence)
            if (self._positions or count) and 0 < limit < reserved:
                break
            count += 1
        return count

    def check_integrity(self, sequence_ids: set[int]) -> None:
        """Raise AssertionError unless exactly these sequences hold positions, within the capacity."""
        assert set(self._positions) == sequence_ids, "positions are reserved outside the window"
        assert len(self) < 2 or not self.capacity.positions or self.usage(1) <= 1, "the KV cache is exceeded"


@dataclass(frozen=True)
class QueueLimits:
    """Limits of the queue. A client with an empty queue may exceed limits that other clients have exhausted."""

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
        """Raise PoolFullError if the queue cannot take a request of this size.

        `tokens`: prompt tokens of all samples together. `entering`: sequences, queued or new, that enter the window at
        once. `preempted`: preempted sequences of the client. `reserve`: extra samples for a client with an empty queue,
        so that no client locks others out. The reserve is at most the limit itself; the token limit doubles.
        """
        in_flight = queue.waiting_of(client) + queue.running_of(client) + preempted
        if self.per_client is not None and in_flight + samples > self.per_client:
            reason = f"{in_flight} samples of this client are in flight, of at most {self.per_client}"
            raise PoolFullError(reason, in_flight + samples - self.per_client)
        waiting = queue.newcomers + samples - entering
        has_reserve = not queue.waiting_of(client) and samples - entering <= self.samples
        max_samples = self.samples + (min(reserve, self.samples) if has_reserve else 0)
        if waiting > max_samples:
            raise PoolFullError(f"the queue is full ({len(queue)} samples wait)", waiting - max_samples)
        max_tokens = (self.tokens or 0) * (1 + has_reserve)
        if self.tokens is not None and waiting > 0 and len(queue) and queue.tokens + tokens > max_tokens:
            reason = f"the queue is full ({queue.tokens} prompt tokens wait, of at most {self.tokens})"
            excess = queue.tokens + tokens - max_tokens
            raise PoolFullError(reason, -(-excess * len(queue) // queue.tokens))
