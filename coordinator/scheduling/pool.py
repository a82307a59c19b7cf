"""The pool: a sliding window of sequences being generated, and the queue behind it. Pure and synchronous.

A sequence is queued -> ready <-> in a round -> leaving -> gone. A sequence whose prompt begins like one that is being
prefilled is parked before it is ready, and one whose reader lags behind is paused until it has caught up. While
sequences wait, others are set aside for them: paused ones, and, for clients and requests that have no place, sequences
of those that have several. Sequences that are set aside leave the window and queue again. A leaving sequence still
counts against the window, because the target worker still holds its slot.
"""

from collections.abc import Iterable
from functools import partial
from itertools import chain, islice

from coordinator.scheduling.capacity import KVCapacity, PoolFullError, QueueLimits
from coordinator.scheduling.fair_queue import FairQueue
from coordinator.scheduling.prefixes import PrefixIndex
from coordinator.scheduling.ready import ReadySet
from coordinator.scheduling.sequence import Finish, FinishReason, GenerationRequest, Sequence


class DuplicateRequestError(Exception):
    """A request of that client with that id is in flight."""


class Pool:
    """At most `max_num_seqs` sequences are generated at a time, and the queue keeps its limits: see `QueueLimits`."""

    def __init__(
        self,
        max_num_seqs: int,
        queue: QueueLimits,
        *,
        by_length: bool = False,
        prefix_caching: bool = True,
        slots: int = 0,
        preempts: bool = True,
    ) -> None:
        """`by_length`: a client's sequences enter in an order that keeps neighbours equally long. `prefix_caching`:
        sequences begin with what is cached of others in their namespace. `slots`: sequences that the target worker can
        hold; those beyond the window serve as prefixes of others. `preempts`: whether sequences in the window give
        their places to others."""
        self.max_num_seqs, self.limits = max_num_seqs, queue
        self.slots = slots or max_num_seqs
        self.kv_capacity = KVCapacity()
        self.rounds = 0
        self._prefix_caching, self._preempts = prefix_caching, preempts
        self._queue = FairQueue(by_length)
        self._parked: dict[int, Sequence] = {}
        self._paused: dict[int, Sequence] = {}
        self._preempted: dict[int, Sequence] = {}
        """Sequences that gave their places to others."""
        self._ready = ReadySet()
        self._in_round: dict[int, Sequence] = {}
        self._leaving: set[int] = set()
        self._reserved: dict[int, int] = {}
        """Positions kept for each sequence in the window or leaving."""
        self._prefixes = PrefixIndex()
        self._by_request: dict[tuple[str, str], dict[int, Sequence]] = {}

    @property
    def queued(self) -> int:
        """Sequences in the queue."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Sequences being generated."""
        in_round = sum(sequence.finish is None for sequence in self._in_round.values())
        return len(self._ready) + len(self._parked) + len(self._paused) + in_round

    @property
    def schedulable(self) -> int:
        """Sequences that are in a round or could be in one."""
        return len(self._ready) + len(self._in_round)

    @property
    def capacity(self) -> int:
        """Sequences that the window can still take in."""
        return max(0, self.max_num_seqs - len(self._reserved))

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of the sequences in the queue."""
        return self._queue.tokens

    @property
    def occupied(self) -> int:
        """Places of the window that are in use, by sequences that are being generated or leaving."""
        return len(self._reserved)

    @property
    def kv_usage(self) -> float:
        """The share of the target worker's KV cache that is kept for the sequences in the window, 0 to 1."""
        if self.kv_capacity.positions:
            return sum(self._reserved.values()) / self.kv_capacity.positions
        return len(self._reserved) / self.slots

    @property
    def is_empty(self) -> bool:
        """Whether no sequence is queued, is generated, or still holds a slot."""
        return not (self._queue or self._reserved or self._preempted)

    @property
    def ready(self) -> ReadySet:
        """Sequences that could be in a round now."""
        return self._ready

    @property
    def members(self) -> Iterable[Sequence]:
        """Sequences in the window that are in no round."""
        return chain(self._ready, self._parked.values(), self._paused.values())

    @property
    def entering(self) -> list[Sequence]:
        """The queued sequence that is next to enter, if the window has capacity for it."""
        return [self._queue.next] if self._queue and self._next_to_enter([self._queue.next]) else []

    def submit(self, samples: Iterable[Sequence]) -> None:
        """Queues the samples of a request, all or none; `admit` lets them in. PoolFullError, DuplicateRequestError."""
        new = list(samples)
        (key,) = {sample.request.key for sample in new}
        if key in self._by_request:
            raise DuplicateRequestError(key)
        check = partial(self._check_limits, key[0], len(new), sum(sample.prompt_length for sample in new))
        try:
            check(entering=0)
        except PoolFullError:  # only now: counting the sequences that enter at once takes longer
            check(entering=self._next_to_enter(chain(self._queue, new)))
        self._queue.add(new)
        self._by_request[key] = {sample.sequence_id: sample for sample in new}

    def check(self, request: GenerationRequest) -> None:
        """Raises what `submit` would raise now, as far as that is known without the prompt.

        PoolFullError, DuplicateRequestError.
        """
        if request.key in self._by_request:
            raise DuplicateRequestError(request.key)
        entering = min(self.capacity, len(self._queue) + request.n)
        self._check_limits(request.client, request.n, 0, entering=entering)

    def _check_limits(self, client: str, samples: int, tokens: int, *, entering: int) -> None:
        """Raises PoolFullError if the queue must not take in a request of this size."""
        aside = sum(sequence.request.client == client for sequence in self._preempted.values())
        self.limits.check(
            self._queue, client, samples, tokens, entering=entering, reserve=self.max_num_seqs, aside=aside
        )

    def admit(self, most: int | None = None) -> list[Sequence]:
        """Moves queued sequences, at most `most`, into the window while it has capacity, and returns them."""
        self._unpark()
        if self._preempts:
            self._make_room()
        admitted = []
        for _ in range(min(self.queued, self.capacity if most is None else min(most, self.capacity))):
            sequence = self._queue.next
            if not self._next_to_enter([sequence]):
                break  # otherwise shorter sequences could pass the one whose turn it is for ever
            self._enter(sequence)
            admitted.append(sequence)
        return admitted

    def _next_to_enter(self, waiting: Iterable[Sequence]) -> int:
        """The number of these, in their order, that the window has capacity for now. Alone a sequence always fits."""
        positions = self.kv_capacity.positions if self.capacity else 0
        number, kept = 0, sum(self._reserved.values()) if positions else 0
        for sequence in islice(waiting, self.capacity):
            kept += self.kv_capacity.taken_by(sequence)
            if (self._reserved or number) and 0 < positions < kept:
                break
            number += 1
        return number

    def _enter(self, sequence: Sequence) -> None:
        self._find_prefix(sequence)
        if self._prefix_caching:
            self._prefixes.add(sequence)
        self._queue.enter(sequence)  # only now: after a fault the sequence is still found where it was
        sequence.is_preempted = False
        self._reserved[sequence.sequence_id] = self.kv_capacity.taken_by(sequence)
        self._park_or_make_ready(sequence)
        self._prefixes.trim(self.slots - self.max_num_seqs + self.capacity)

    def _find_prefix(self, sequence: Sequence) -> None:
        """Looks for a prefix. Samples of one request come with a source, which may have finished meanwhile."""
        given = sequence.target_prefix
        if self._prefix_caching and (given is None or given.source.finish is not None):
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

    def _make_room(self) -> None:
        """Sets sequences aside for those that wait: the ones that paused first or, if none is paused, one whose client
        or request has more than its share."""
        wanting = len(self._queue) - self.capacity - len(self._leaving)
        for sequence in list(islice(self._paused.values(), max(0, wanting))):
            self._set_aside(sequence)
        if self._queue and not self.capacity and not self._leaving:
            yielding = self._queue.first_to_yield(chain(self._parked.values(), self._ready))
            if yielding is not None:
                self._set_aside(yielding)

    def _set_aside(self, sequence: Sequence) -> None:
        sequence_id = sequence.sequence_id
        if sequence_id in self._ready:
            self._ready.pop(sequence_id)
        elif self._parked.pop(sequence_id, None) is None:
            del self._paused[sequence_id]
        self._preempted[sequence_id] = sequence
        self._leaving.add(sequence_id)
        self._prefixes.discard(sequence)
        sequence.preempt()

    def _queue_again(self, sequence_id: int) -> None:
        """Queues a sequence that was set aside, once it is to go on and its place is free."""
        sequence = self._preempted.get(sequence_id)
        if sequence is not None and not sequence.paused and sequence_id not in self._leaving:
            del self._preempted[sequence_id]
            self._queue.add([sequence])

    def _make_ready(self, sequence: Sequence) -> None:
        if sequence.paused:
            self._paused[sequence.sequence_id] = sequence
            return
        sequence.ready_since = self.rounds
        self._ready.add(sequence)

    def pause(self, sequence: Sequence) -> None:
        """Keeps a sequence out of rounds until `resume`, from the end of its present round on. It holds its slot until
        another sequence wants it."""
        sequence.paused = True
        if sequence.sequence_id in self._ready:
            self._paused[sequence.sequence_id] = self._ready.pop(sequence.sequence_id)

    def resume(self, sequence: Sequence) -> None:
        """Makes a paused sequence ready again, behind all others, or queues it if it was set aside."""
        sequence.paused = False
        self._queue_again(sequence.sequence_id)
        if self._paused.pop(sequence.sequence_id, None) is not None:
            self._make_ready(sequence)

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
        if self._prefix_caching:
            self._prefixes.finish(sequence)

    def _forget(self, sequence: Sequence) -> None:
        """Takes the sample out of its request, whose id may be another request's by now if it was aborted."""
        key = sequence.request.key
        samples = self._by_request.get(key, {})
        samples.pop(sequence.sequence_id, None)
        if not samples:
            self._by_request.pop(key, None)

    def find(self, client: str, request_id: str) -> list[Sequence]:
        """The samples in flight of a client's request."""
        return list(self._by_request.get((client, request_id), {}).values())

    def abort(self, sequence: Sequence) -> None:
        """Ends a sequence in any state; one in a round leaves after it. A finished sequence stays as it is."""
        sequence_id, in_flight = sequence.sequence_id, self._by_request.get(sequence.request.key, {})
        if sequence_id not in in_flight or sequence.finish is not None:
            return
        sequence.finish = Finish(FinishReason.ABORT)
        self._forget(sequence)
        if self._preempted.pop(sequence_id, None) is not None:
            pass  # it holds no slot, or is leaving already
        elif sequence_id in self._queue:
            self._queue.discard(sequence)
        elif sequence_id in self._ready:
            self._ready.pop(sequence_id)
            self._leave(sequence)
        elif (self._parked.pop(sequence_id, None) or self._paused.pop(sequence_id, None)) is not None:
            self._leave(sequence)

    @property
    def leaving(self) -> set[int]:
        """Ids of sequences whose slots are to be released."""
        return set(self._leaving)

    def released(self, sequence_ids: Iterable[int]) -> None:
        """Takes in that the workers have freed these sequences: the window has capacity again."""
        for sequence_id in self._leaving.intersection(sequence_ids):
            self._leaving.remove(sequence_id)
            del self._reserved[sequence_id]
            self._queue.leave(sequence_id)
            self._queue_again(sequence_id)

    def check_integrity(self) -> None:
        """Raises AssertionError if a sequence is in two states or the window is exceeded."""
        self._queue.check_integrity()
        queued, ready = ({sequence.sequence_id for sequence in some} for some in (self._queue, self._ready))
        states = [queued, set(self._parked), set(self._paused), ready, set(self._in_round), self._leaving]
        assert len(set().union(*states)) == sum(map(len, states)), "a sequence is in two states"
        assert sum(map(len, states[1:])) <= self.max_num_seqs, "the window is exceeded"
        assert set(self._reserved) == set().union(*states[1:]), "positions are reserved outside the window"
        assert (
            len(self._reserved) < 2
            or not self.kv_capacity.positions
            or sum(self._reserved.values()) <= self.kv_capacity.positions
        )
        assert all(sequence.paused for sequence in self._paused.values()), "a sequence waits for no reader"
        assert not (self._preempted.keys() - self._leaving) & (set().union(*states)), "a sequence is aside and inside"
        most = self.limits.samples + min(self.max_num_seqs, self.limits.samples)
        assert self._queue.newcomers <= most + self.capacity, "the queue is exceeded"
