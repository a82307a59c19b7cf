"""Admission limits: pages of the target worker's KV cache, and the size of the queue. Pure."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import islice

from coordinator.scheduling.fair_queue import FairQueue
from coordinator.scheduling.sequence import Sequence

# Tokens that a preempted sequence gains before it is preempted for pages again: at least, and by its length.
MIN_PROGRESS, PROGRESS_SHARE = 64, 16


def protected_tokens(length: int) -> int:
    """Return how many tokens a sequence of this length gains before it may be preempted. It takes their pages first."""
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
    """Size of the target worker's KV cache in pages."""

    pages: int = 0
    """0: unlimited."""
    page_size: int = 0
    """Positions per page. 0: unknown, so sequences share no pages."""

    def pages_for(self, length: int) -> int:
        """Return the number of pages needed for this many positions."""
        return -(-length // max(1, self.page_size))


@dataclass
class _Holding:
    """The pages of a sequence."""

    sequence: Sequence
    digests: list[bytes]
    """Digests of its leading pages, which sequences with the same digests share."""
    num_own: int = 0
    """Further pages."""

    def __len__(self) -> int:
        return len(self.digests) + self.num_own


class HeldPages:
    """Pages of the target worker held by the sequences in the window. A shared page counts once.

    Equal pages that sequences compute at the same time also count once, although each sequence holds its own. If the
    worker therefore runs out of pages, it answers NO_SLOT.
    """

    def __init__(self) -> None:
        self.capacity = KVCapacity()
        self.used = 0
        self._holdings: dict[int, _Holding] = {}
        self._references: dict[bytes, int] = {}
        self._by_client: Counter[str] = Counter()

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self._holdings)

    def __getitem__(self, sequence_id: int) -> int:
        """Return the number of pages that only this sequence holds, so that its departure frees them."""
        holding = self._holdings[sequence_id]
        return len(holding) - self._count_held(holding.digests, 2)

    def _count_held(self, digests: Items[bytes], holders: int) -> int:
        """Count the pages with at least this many holders. Whoever holds a page also holds the pages before it."""
        return bisect_right(digests, -holders, key=lambda digest: -self._references.get(digest, 0))

    @property
    def is_limited(self) -> bool:
        return self.capacity.pages > 0

    @property
    def free(self) -> int:
        """Number of pages that no sequence holds. 0 if pages are not limited."""
        return max(0, self.capacity.pages - self.used)

    def resize(self, capacity: KVCapacity) -> None:
        """Adapt to a worker with this capacity."""
        sequences = [holding.sequence for holding in self._holdings.values()]
        is_new_size = capacity.page_size != self.capacity.page_size
        for sequence in sequences if is_new_size else ():
            self.remove(sequence.sequence_id)
        self.capacity = capacity
        for sequence in sequences if is_new_size else ():
            self.add(sequence)

    def needed_by(self, sequence: Sequence) -> int:
        """Return the number of free pages that a sequence needs to enter the window."""
        return self._num_pages(sequence) - self._count_held(self._digests(sequence), 1)

    def _num_pages(self, sequence: Sequence) -> int:
        length = sequence.next_length + protected_tokens(len(sequence.token_ids))
        return self.capacity.pages_for(min(length, sequence.max_length))

    def _digests(self, sequence: Sequence) -> list[bytes]:
        """Return the digests of pages that a sequence can share. At least its last token runs, in a page of its own."""
        return sequence.page_digests(self.capacity.page_size, len(sequence.token_ids) - 1)

    def add(self, sequence: Sequence) -> None:
        """Give a sequence that enters the window its pages."""
        holding = self._holdings[sequence.sequence_id] = _Holding(sequence, self._digests(sequence))
        for digest in holding.digests:
            count = self._references[digest] = self._references.get(digest, 0) + 1
            self._count(sequence, count == 1)
        self._take(holding, self._num_pages(sequence) - len(holding))

    def grow(self, sequence: Sequence) -> bool:
        """Give a sequence the pages for its next round. Return False if too few are free."""
        missing = self.missing(sequence)
        if missing > self.free and len(self) > 1 and self.is_limited:
            return False
        self._take(self._holdings[sequence.sequence_id], missing)
        return True

    def missing(self, sequence: Sequence) -> int:
        """Return the number of pages that a sequence lacks for its next round."""
        wanted = self.capacity.pages_for(min(sequence.next_length, sequence.max_length))
        return max(0, wanted - len(self._holdings[sequence.sequence_id]))

    def _take(self, holding: _Holding, num_pages: int) -> None:
        holding.num_own += num_pages
        self._count(holding.sequence, num_pages)

    def _count(self, sequence: Sequence, num_pages: int) -> None:
        self.used += num_pages
        self._by_client[sequence.request.client] += num_pages

    def remove(self, sequence_id: int) -> None:
        """Take back all pages of a sequence."""
        holding = self._holdings.pop(sequence_id)
        for digest in holding.digests:
            self._references[digest] -= 1
            if not self._references[digest]:
                del self._references[digest]
                self._count(holding.sequence, -1)
        self._take(holding, -holding.num_own)
        if not self._by_client[holding.sequence.request.client]:
            del self._by_client[holding.sequence.request.client]

    def by_client(self, leaving: Iterable[int], left: Counter[bytes]) -> Counter[str]:
        """Return the pages of each client, without those that the `leaving` sequences free. `left`: see `leave`."""
        counts = self._by_client.copy()
        for sequence_id in leaving:
            counts[self._holdings[sequence_id].sequence.request.client] -= self.leave(sequence_id, left)
        return counts

    def leave(self, sequence_id: int, left: Counter[bytes]) -> int:
        """Return how many more pages become free if a sequence leaves after others.

        `left`: number of earlier leavers that held each shared page, by digest. Updated with this sequence.
        """
        holding = self._holdings[sequence_id]
        shared = holding.digests[: self._count_held(holding.digests, 2)]
        left.update(shared)
        return len(holding) - len(shared) + sum(left[digest] == self._references[digest] for digest in shared)

    def usage(self, slots: int) -> float:
        """Return the share of pages that sequences hold, 0 to 1. `slots`: slots of the target worker."""
        return self.used / self.capacity.pages if self.is_limited else len(self) / slots

    def count_fitting(self, waiting: Iterable[Sequence], places: int) -> int:
        """Number of `waiting` sequences, in order, that fit into `places`. An empty cache always fits the first."""
        limit = self.capacity.pages if places else 0
        count, used = 0, self.used
        for sequence in islice(waiting, places):
            used += self.needed_by(sequence) if limit else 0
            if (self._holdings or count) and 0 < limit < used:
                break
            count += 1
        return count

    def check_integrity(self, sequence_ids: set[int]) -> None:
        """Raise AssertionError unless exactly these sequences hold pages, within the capacity."""
        assert set(self._holdings) == sequence_ids, "pages are held outside the window"
        digests = Counter(digest for holding in self._holdings.values() for digest in holding.digests)
        assert self._references == digests, "holders of a page are miscounted"
        by_client: dict[str, int] = {}
        for holding in self._holdings.values():
            client, own = holding.sequence.request.client, holding.num_own
            first = sum(digests.pop(digest, 0) > 0 for digest in holding.digests)
            by_client[client] = by_client.get(client, 0) + own + first
        assert self._by_client == by_client, "pages of a client are miscounted"
        assert self.used == sum(by_client.values()), "pages are miscounted"
        assert len(self) < 2 or not self.is_limited or self.usage(1) <= 1, "the KV cache is exceeded"


@dataclass(frozen=True)
class QueueLimits:
    """Limits of the queue. A client with few samples in it may exceed limits that other clients have exhausted."""

    samples: int
    """Maximum number of samples that wait."""
    tokens: int | None = None
    """Maximum tokens of waiting prompts and predictions. A single request may exceed it. None: unlimited."""
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

        `tokens`: of the prompts and predictions of all samples. `entering`: sequences, queued or new, that enter the
        window at once. `preempted`: preempted sequences of the client. `reserve`: extra samples for clients with an
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
            reason = f"the queue is full ({queue.tokens} tokens wait, of at most {self.tokens})"
            excess = queue.tokens + tokens - max_tokens
            raise QueueLimitError(reason, -(-excess * len(queue) // queue.tokens))
