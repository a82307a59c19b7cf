"""The pool: a sliding window of sequences being generated, and the queue behind it. Pure and synchronous.

A sequence is queued -> ready <-> in a round -> leaving -> gone. A sequence whose prompt begins like one that is being
prefilled is parked before it is ready. A leaving sequence still counts against the window, because the target worker
still holds its slot.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import chain, islice

from coordinator.scheduling.capacity import KVCapacity
from coordinator.scheduling.prefixes import PrefixIndex
from coordinator.scheduling.ready import ReadySet
from coordinator.scheduling.sequence import Finish, FinishReason, Sequence

# Newcomers that may enter before the sequence that waits longest, where admission is by length.
MOST_PASSED_OVER = 16


class PoolFullError(Exception):
    """The queue is full."""


class DuplicateRequestError(Exception):
    """A request of that id is in flight."""


class Pool:
    """At most `window_size` sequences are generated at a time, at most `queue_size` wait in the queue.

    `slots`: sequences that the target worker can hold; those beyond the window serve as prefixes of others.
    """

    def __init__(
        self, window_size: int, queue_size: int, by_length: bool = False, prefix_reuse: bool = True, slots: int = 0
    ) -> None:
        """`by_length`: sequences enter in an order that keeps neighbours about equally long, not in that of arrival.
        `prefix_reuse`: sequences begin with what is cached of others."""
        self.window_size, self.queue_size = window_size, queue_size
        self.slots = slots or window_size
        self.kv_capacity = KVCapacity()
        self.rounds = 0
        self._by_length, self._prefix_reuse = by_length, prefix_reuse
        self._last_length = 0
        self._passed_over = 0
        self._queue: OrderedDict[int, Sequence] = OrderedDict()
        self._parked: dict[int, Sequence] = {}
        self._ready = ReadySet()
        self._in_round: dict[int, Sequence] = {}
        self._leaving: set[int] = set()
        self._reserved: dict[int, int] = {}
        """Positions kept for each sequence in the window or leaving."""
        self._prefixes = PrefixIndex()
        self._by_request: dict[str, dict[int, Sequence]] = {}

    @property
    def queued(self) -> int:
        """Sequences in the queue."""
        return len(self._queue)

    @property
    def is_full(self) -> bool:
        """Whether not even a request of one sample could be queued."""
        return self.queued >= self.queue_size + self.capacity

    @property
    def running(self) -> int:
        """Sequences being generated."""
        in_round = sum(sequence.finish is None for sequence in self._in_round.values())
        return len(self._ready) + len(self._parked) + in_round

    @property
    def schedulable(self) -> int:
        """Sequences that are in a round or could be in one."""
        return len(self._ready) + len(self._in_round)

    @property
    def capacity(self) -> int:
        """Sequences that the window can still take in."""
        taken = len(self._ready) + len(self._parked) + len(self._in_round) + len(self._leaving)
        return max(0, self.window_size - taken)

    @property
    def is_empty(self) -> bool:
        """Whether no sequence is queued, is generated, or still holds a slot."""
        return not (self._queue or self._parked or self._ready or self._in_round or self._leaving)

    @property
    def ready(self) -> ReadySet:
        """Sequences that could be in a round now."""
        return self._ready

    @property
    def members(self) -> Iterable[Sequence]:
        """Sequences in the window that are in no round."""
        return chain(self._ready, self._parked.values())

    @property
    def entering(self) -> list[Sequence]:
        """Queued sequences that the window has capacity for."""
        return list(islice(self._queue.values(), self._next_to_enter(self._queue.values())))

    def submit(self, samples: Iterable[Sequence]) -> None:
        """Queues the samples of a request, all or none; `admit` lets them in. PoolFullError, DuplicateRequestError."""
        new = {sample.sequence_id: sample for sample in samples}
        (request_id,) = {sample.request.request_id for sample in new.values()}
        if request_id in self._by_request:
            raise DuplicateRequestError(request_id)
        waiting = len(self._queue) + len(new)
        if waiting > self.queue_size:  # sequences for which there is room enter at once
            waiting -= self._next_to_enter(chain(self._queue.values(), new.values()))
        if waiting > self.queue_size:
            raise PoolFullError
        self._queue.update(new)
        self._by_request[request_id] = new

    def admit(self, most: int | None = None) -> list[Sequence]:
        """Moves queued sequences, at most `most`, into the window while it has capacity, and returns them."""
        self._unpark()
        admitted = []
        for _ in range(min(self.queued, self.capacity if most is None else min(most, self.capacity))):
            chosen = self._next()
            if not self._next_to_enter([self._queue[chosen]]):
                break  # else shorter sequences would pass over the one that waits longest for ever
            self._passed_over = 0 if chosen == next(iter(self._queue)) else self._passed_over + 1
            sequence = self._queue[chosen]
            self._last_length = sequence.prompt_length
            self._enter(sequence)
            del self._queue[chosen]  # only now: after a fault the sequence is still found where it was
            admitted.append(sequence)
        return admitted

    def _next(self) -> int:
        """The id of the next sequence to enter: with `by_length` the one whose prompt is nearest in length to the last
        one's, unless the first in the queue was passed over too often."""
        if self._by_length and self._passed_over < MOST_PASSED_OVER:
            return min(self._queue, key=lambda waiting: abs(self._queue[waiting].prompt_length - self._last_length))
        return next(iter(self._queue))

    def _next_to_enter(self, waiting: Iterable[Sequence]) -> int:
        """The number of these, in their order, that the window has capacity for now. Alone a sequence always fits."""
        number, kept = 0, sum(self._reserved.values())
        for sequence in islice(waiting, self.capacity):
            kept += self.kv_capacity.taken_by(sequence)
            if (self._reserved or number) and 0 < self.kv_capacity.positions < kept:
                break
            number += 1
        return number

    def _enter(self, sequence: Sequence) -> None:
        self._reserved[sequence.sequence_id] = self.kv_capacity.taken_by(sequence)
        self._find_prefix(sequence)
        if self._prefix_reuse:
            self._prefixes.add(sequence)
        self._park_or_make_ready(sequence)
        self._prefixes.trim(self.slots - self.window_size + self.capacity)

    def _find_prefix(self, sequence: Sequence) -> None:
        """Looks for a longer prefix. Samples of one request come with a source, which may have finished meanwhile."""
        given = sequence.target_prefix
        if self._prefix_reuse and (given is None or given.source.finish is not None):
            sequence.target_prefix = sequence.draft_prefix = self._prefixes.find(sequence) or given

    def _park_or_make_ready(self, sequence: Sequence) -> None:
        if sequence.target_prefix is not None and sequence.target_prefix.is_coming:
            self._parked[sequence.sequence_id] = sequence
        else:
            self._make_ready(sequence)

    def _unpark(self) -> None:
        for sequence in list(self._parked.values()):
            if sequence.target_prefix is None or not sequence.target_prefix.is_coming:
                self._find_prefix(sequence)
                del self._parked[sequence.sequence_id]
                self._park_or_make_ready(sequence)

    def _make_ready(self, sequence: Sequence) -> None:
        sequence.ready_since = self.rounds
        self._ready.add(sequence)

    def begin_round(self, group: Iterable[Sequence]) -> None:
        """Makes the group's sequences unready until `end_round`. ValueError if one is not ready or there twice."""
        group = list(group)
        if len({sequence.sequence_id for sequence in group if sequence.sequence_id in self._ready}) < len(group):
            raise ValueError("a group has a sequence that is not ready, or one twice")
        self.rounds += 1
        for sequence in group:
            self._in_round[sequence.sequence_id] = self._ready.pop(sequence.sequence_id)

    def end_round(self, group: Iterable[Sequence]) -> None:
        """Makes the sequences of the group that have not finished ready again, behind all others."""
        for sequence in group:
            if self._in_round.pop(sequence.sequence_id, None) is None:
                continue
            if sequence.finish is None:
                self._make_ready(sequence)
            else:
                self._leave(sequence)
                self._forget(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self._leaving.add(sequence.sequence_id)
        sequence.target_prefix = sequence.draft_prefix = None  # else whole histories would be kept alive
        if self._prefix_reuse:
            self._prefixes.finish(sequence)

    def _forget(self, sequence: Sequence) -> None:
        """Takes the sample out of its request, whose id may be another request's by now if it was aborted."""
        request_id = sequence.request.request_id
        samples = self._by_request.get(request_id, {})
        samples.pop(sequence.sequence_id, None)
        if not samples:
            self._by_request.pop(request_id, None)

    def find(self, request_id: str) -> list[Sequence]:
        """The samples in flight of a request."""
        return list(self._by_request.get(request_id, {}).values())

    def abort(self, sequence: Sequence) -> None:
        """Ends a sequence in any state; one in a round leaves after it. A finished sequence stays as it is."""
        in_flight = self._by_request.get(sequence.request.request_id, {})
        if sequence.sequence_id not in in_flight or sequence.finish is not None:
            return
        sequence.finish = Finish(FinishReason.ABORT)
        self._forget(sequence)
        self._queue.pop(sequence.sequence_id, None)
        if sequence.sequence_id in self._ready:
            self._ready.pop(sequence.sequence_id)
            self._leave(sequence)
        elif self._parked.pop(sequence.sequence_id, None) is not None:
            self._leave(sequence)
        elif sequence.sequence_id not in self._in_round:
            self._reserved.pop(sequence.sequence_id, None)  # of one that a fault kept from entering

    @property
    def leaving(self) -> set[int]:
        """Ids of sequences whose slots are to be released."""
        return set(self._leaving)

    def released(self, sequence_ids: Iterable[int]) -> None:
        """Takes in that the workers have freed these sequences: the window has capacity again."""
        for sequence_id in sequence_ids:
            self._leaving.discard(sequence_id)
            self._reserved.pop(sequence_id, None)

    def check_integrity(self) -> None:
        """Raises AssertionError if a sequence is in two states or the window is exceeded."""
        ready = {sequence.sequence_id for sequence in self._ready}
        states = [set(self._queue), set(self._parked), ready, set(self._in_round), self._leaving]
        assert len(set().union(*states)) == sum(map(len, states)), "a sequence is in two states"
        assert sum(map(len, states[1:])) <= self.window_size, "the window is exceeded"
        assert set(self._reserved) == set().union(*states[1:]), "positions are reserved outside the window"
        assert (
            len(self._reserved) < 2
            or not self.kv_capacity.positions
            or sum(self._reserved.values()) <= self.kv_capacity.positions
        )
        assert len(self._queue) <= self.queue_size + self.capacity, "the queue is exceeded"
