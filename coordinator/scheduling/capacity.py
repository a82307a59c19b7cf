"""What limits the sequences that the pool takes in: the capacity of the target worker's KV cache, and the limits of the
queue. Pure."""

from dataclasses import dataclass

from coordinator.scheduling.fair_queue import FairQueue
from coordinator.scheduling.sequence import Sequence


class PoolFullError(Exception):
    """The queue cannot take in a request, for the reason that the message gives. `places`: the number of sequences that
    must end first."""

    def __init__(self, reason: str, places: int) -> None:
        super().__init__(reason)
        self.places = places


@dataclass(frozen=True)
class KVCapacity:
    """Positions that the target worker can cache for all sequences together."""

    positions: int = 0
    """0: any number."""
    multiple: int = 1
    """The positions of each sequence are rounded up to a multiple of this."""

    def taken_by(self, sequence: Sequence) -> int:
        """Positions that are kept for a sequence."""
        multiple = max(1, self.multiple)
        return -(-sequence.max_length // multiple) * multiple


@dataclass(frozen=True)
class QueueLimits:
    """Limits of the queue. A client with nothing in the queue may exceed limits that others have used up: see
    `reserve`."""

    samples: int
    """Most samples that wait."""
    tokens: int | None = None
    """Most prompt tokens of all samples that wait, unless only one request waits; None: any number."""
    per_client: int | None = None
    """Most samples of one client, waiting and in the window; None: any number."""

    def check(
        self, queue: FairQueue, client: str, samples: int, tokens: int, *, entering: int, reserve: int, aside: int = 0
    ) -> None:
        """Raises PoolFullError if a request must not wait.

        `samples` and `tokens`: its samples, and the prompt tokens of all of them together. `entering`: number of
        sequences, waiting or new, that the window takes in at once. `reserve`: samples beyond the limit that may wait
        if their client had nothing in the queue before, so that no client can keep others out; at most as many as the
        limit itself, and likewise tokens up to twice their limit.
        """
        in_flight = queue.waiting_of(client) + queue.running_of(client) + aside
        if self.per_client is not None and in_flight + samples > self.per_client:
            reason = f"{in_flight} samples of this client are in flight, of at most {self.per_client}"
            raise PoolFullError(reason, in_flight + samples - self.per_client)
        waiting = queue.newcomers + samples - entering
        is_newcomer = not queue.waiting_of(client) and samples - entering <= self.samples
        most = self.samples + (min(reserve, self.samples) if is_newcomer else 0)
        if waiting > most:
            raise PoolFullError(f"the queue is full ({len(queue)} samples wait)", waiting - most)
        most_tokens = (self.tokens or 0) * (1 + is_newcomer)
        if self.tokens is not None and waiting > 0 and len(queue) and queue.tokens + tokens > most_tokens:
            reason = f"the queue is full ({queue.tokens} prompt tokens wait, of at most {self.tokens})"
            excess = queue.tokens + tokens - most_tokens
            raise PoolFullError(reason, -(-excess * len(queue) // queue.tokens))
