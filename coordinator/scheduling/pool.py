"""The pool: a sliding window of sequences being generated, and the queue behind it. Pure and synchronous.

A sequence is queued -> ready <-> in a round -> leaving -> gone. It can be ready again while its round runs, if the next
one can begin before the result is known. A leaving sequence still counts against the window, because the target worker
still holds its slot.

- Parked: waits for another sequence that is prefilling the same prefix.
- Paused: waits for its reader to catch up.
- Cramped: waits for positions in the target's KV cache to continue.
- Preempted: taken out of the window for another sequence, and queued again. Paused sequences are preempted first, then
  sequences of clients with more than their share of the places or positions.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain, islice

from coordinator.scheduling.capacity import DuplicateRequestError, PoolFullError, QueueLimits, Reservations
from coordinator.scheduling.fair_queue import FairQueue
from coordinator.scheduling.preemption import longest_of_largest, own_victim, protect, victims_for
from coordinator.scheduling.prefixes import PrefixIndex
from coordinator.scheduling.ready import ReadySet
from coordinator.scheduling.sequence import Finish, FinishReason, GenerationRequest, Sequence
from coordinator.scheduling.worker_time import Part, WorkerTime

# Sequences that may overtake one that does not fit in the KV cache yet, because they need less room.
MAX_OVERTAKEN = 16
# No more sequences enter at once after this many tokens: other clients wait meanwhile.
MAX_ADMITTED_TOKENS = 65_536


class Pool:
    """Generates at most `max_num_seqs` sequences at a time; `QueueLimits` bounds the queue."""

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
        """`by_length`: admit equally long sequences of a client one after the other. `prefix_caching`: copy cached
        prefixes within a namespace. `slots`: slots of the target worker; slots beyond the window keep prefixes of
        finished sequences. `preempts`: whether sequences may be preempted."""
        self.max_num_seqs, self.limits = max_num_seqs, queue
        self.slots = slots or max_num_seqs
        self.reservations = Reservations()
        self._worker_time = WorkerTime()
        self.rounds = 0
        self._prefix_caching, self._preempts = prefix_caching, preempts
        self._queue = FairQueue(by_length)
        self._parked: dict[int, Sequence] = {}
        self._paused: dict[int, Sequence] = {}
        self._cramped: dict[int, Sequence] = {}
        self._preempted: dict[int, Sequence] = {}
        self.ready = ReadySet()
        self._in_round: dict[int, Sequence] = {}
        """Sequences in a round that cannot join another one yet."""
        self._open_rounds: dict[int, int] = {}
        """Rounds of each sequence that have begun and not ended."""
        self._leaving: set[int] = set()
        self.background: set[int] = set()
        """Background sequences in the window. Requests that wait for their places do not count against the queue."""
        self._prefixes = PrefixIndex()
        self._by_request: dict[tuple[str, str], dict[int, Sequence]] = {}

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of the queued sequences."""
        return self._queue.tokens

    @property
    def running(self) -> int:
        """Sequences being generated."""
        in_round = sum(sequence.finish is None for sequence in self._in_round.values())
        return len(self.ready) + len(self._parked) + len(self._paused) + len(self._cramped) + in_round

    @property
    def schedulable(self) -> int:
        """Sequences that are ready or in a round."""
        return len(self.ready) + len(self._in_round)

    @property
    def occupied(self) -> int:
        """Places of the window in use, including leaving sequences."""
        return len(self.reservations)

    @property
    def capacity(self) -> int:
        """Free places of the window."""
        return max(0, self.max_num_seqs - self.occupied)

    @property
    def kv_usage(self) -> float:
        """Reserved share of the target worker's KV cache, 0 to 1."""
        return self.reservations.usage(self.slots)

    @property
    def is_empty(self) -> bool:
        """Whether no sequence is queued, runs, or holds a slot."""
        return not (self._queue or self.occupied or self._preempted)

    @property
    def members(self) -> Iterable[Sequence]:
        """Sequences in the window that are in no round."""
        return chain(self.ready, self._parked.values(), self._paused.values(), self._cramped.values())

    @property
    def eligible(self) -> ReadySet:
        """Ready sequences of the clients that may join the next round."""
        if not self._preempts:
            return self.ready
        clients = self._active_clients
        allowed = self._worker_time.may_run(clients)
        if len(allowed) == len(clients):
            return self.ready
        return ReadySet(s for s in self.ready if s.request.client in allowed or s.request.is_background)

    @property
    def _active_clients(self) -> set[str]:
        """Clients with sequences that are ready or in a round. Background sequences take no share of worker time."""
        active = chain(self.ready, self._in_round.values())
        return {sequence.request.client for sequence in active if not sequence.request.is_background}

    @property
    def newcomers(self) -> ReadySet:
        """Eligible sequences that the target worker has not seen."""
        in_round = self._open_rounds
        return ReadySet(s for s in self.eligible if not s.num_cached_tokens and s.sequence_id not in in_round)

    def add_round_time(self, parts: Mapping[str, Part], seconds: float, pass_seconds: Callable[[float], float]) -> None:
        """Count the time of a round that ends, by client: see `WorkerTime.add_round`."""
        active = self._active_clients
        self._worker_time.add_round(parts, seconds, pass_seconds, active | self._queue.clients_without_place())

    @property
    def in_flight(self) -> list[Sequence]:
        """All unfinished sequences, queued or in the window."""
        return [sequence for samples in self._by_request.values() for sequence in samples.values()]

    @property
    def is_cramped(self) -> bool:
        """Whether a sequence waits for positions to continue."""
        return bool(self._cramped)

    @property
    def entering(self) -> list[Sequence]:
        """The next queued sequence, if it fits in the window."""
        return [self._queue.next] if self._queue and self._count_fitting([self._queue.next]) else []

    @property
    def awaits_places(self) -> bool:
        """Whether sequences wait for the places of preempted ones that still hold slots."""
        return bool(self._queue) and not self._leaving.isdisjoint(self._preempted)

    @property
    def leaving(self) -> set[int]:
        """Leaving sequences whose rounds have ended, so that their slots can be released."""
        return self._leaving - self._open_rounds.keys()

    def has_other_rounds(self, group: Iterable[Sequence]) -> bool:
        """Whether a sequence of this group, which is in a round, is also in another round."""
        return any(self._open_rounds[sequence.sequence_id] > 1 for sequence in group)

    def submit(self, samples: Iterable[Sequence]) -> None:
        """Queue the samples of a request, all or none. Raises PoolFullError, DuplicateRequestError."""
        new = list(samples)
        (key,) = {sample.request.key for sample in new}
        if key in self._by_request:
            raise DuplicateRequestError(key)
        check, tokens = partial(self._check_limits, key[0], len(new)), sum(sample.prompt_length for sample in new)
        try:
            check(tokens, entering=0)
        except PoolFullError:  # counting the sequences that enter takes longer, so do it only if needed
            entering = self._count_fitting(chain(self._queue, new))
            entering_tokens = sum(sample.prompt_length for sample in islice(chain(self._queue, new), entering))
            check(tokens - entering_tokens, entering=entering)
        self._queue.add(new)
        self._by_request[key] = {sample.sequence_id: sample for sample in new}

    def check(self, request: GenerationRequest) -> None:
        """Raise the errors of `submit` that do not depend on the prompt."""
        if request.key in self._by_request:
            raise DuplicateRequestError(request.key)
        entering = min(self.capacity, len(self._queue) + request.n)
        self._check_limits(request.client, request.n, 0, entering=entering)

    def _check_limits(self, client: str, samples: int, tokens: int, *, entering: int) -> None:
        preempted = sum(sequence.request.client == client for sequence in self._preempted.values())
        entering += len(self.background)
        self.limits.check(
            self._queue, client, samples, tokens, entering=entering, reserve=self.max_num_seqs, preempted=preempted
        )

    def admit(self, limit: int | None = None) -> list[Sequence]:
        """Move at most `limit` queued sequences into the window while they fit, and return them.

        Long prompts enter over several calls.
        """
        self._unpark()
        for cramped in list(self._cramped.values()):
            if self.reservations.grow(cramped):
                self.ready.add(self._cramped.pop(cramped.sequence_id))
        if self._preempts:
            self._make_places()
            self._make_room()
        admitted, tokens = list[Sequence](), 0
        for _ in range(min(self.queued, self.capacity if limit is None else min(limit, self.capacity))):
            sequence = self._next_fitting()
            if sequence is None:
                break
            self._enter(sequence)
            admitted.append(sequence)
            tokens += len(sequence.token_ids)
            if tokens > MAX_ADMITTED_TOKENS:
                break
        return admitted

    def _next_fitting(self) -> Sequence | None:
        """The waiting sequence that enters next. Shorter ones may overtake, but only so often."""
        if self._cramped:
            return None
        first = self._queue.next
        for sequence in self._candidates():
            if self._count_fitting([sequence]):
                first.overtaken += sequence is not first
                return sequence
        return None

    def _candidates(self) -> Iterable[Sequence]:
        """Waiting sequences that may enter next if they fit, first to last."""
        first = self._queue.next
        return self._queue.in_turn() if first.overtaken < MAX_OVERTAKEN else [first]

    def _count_fitting(self, waiting: Iterable[Sequence]) -> int:
        return self.reservations.count_fitting(waiting, self.capacity)

    def _enter(self, sequence: Sequence) -> None:
        self._find_prefix(sequence)
        if self._shares_prefixes(sequence):
            self._prefixes.add(sequence)
        self._queue.enter(sequence)  # last, so that an error above leaves the sequence queued
        if sequence.is_preempted:
            protect(sequence)
        sequence.is_preempted, sequence.overtaken = False, 0
        self.reservations.add(sequence)
        if sequence.request.is_background:
            self.background.add(sequence.sequence_id)
        self._park_or_make_ready(sequence)
        self._prefixes.trim(self.slots - self.max_num_seqs + self.capacity)

    def _find_prefix(self, sequence: Sequence) -> None:
        """Look for a prefix. Samples of one request start with a source, which may have finished since."""
        initial = sequence.target_prefix
        if self._shares_prefixes(sequence) and (initial is None or initial.source.finish is not None):
            sequence.target_prefix = sequence.draft_prefix = self._prefixes.find(sequence) or initial

    def _shares_prefixes(self, sequence: Sequence) -> bool:
        return self._prefix_caching and not sequence.request.is_background

    def _park_or_make_ready(self, sequence: Sequence) -> None:
        if sequence.target_prefix is not None and sequence.target_prefix.is_pending:
            self._parked[sequence.sequence_id] = sequence
        else:
            self._make_ready(sequence)

    def _unpark(self) -> None:
        for sequence in list(self._parked.values()):
            if sequence.target_prefix is None or not sequence.target_prefix.is_pending:
                self._find_prefix(sequence)
                del self._parked[sequence.sequence_id]
                self._park_or_make_ready(sequence)

    def _make_ready(self, sequence: Sequence) -> None:
        if sequence.paused:
            self._paused[sequence.sequence_id] = sequence
            return
        sequence.ready_since = self.rounds
        if self.reservations.grow(sequence):
            self.ready.add(sequence)
        else:
            self._cramped[sequence.sequence_id] = sequence

    def _make_places(self) -> None:
        """Preempt paused sequences, longest paused first, and sequences of clients above their share of places."""
        coming = self.capacity + len(self._leaving)
        for sequence in list(islice(self._paused.values(), max(0, len(self._queue) - coming))):
            self._preempt(sequence)
            coming += 1
        members = partial(chain, self._parked.values(), self.ready)
        for sequence in self._queue.slot_victims(members(), coming, self._would_fit):
            self._preempt(sequence)
            coming += 1
        if self._queue and not coming:
            victim = self._queue.request_victim(members(), self._would_fit)
            if victim is not None:
                self._preempt(victim)

    def _would_fit(self, sequence: Sequence, victims: Iterable[Sequence]) -> bool:
        """Whether a waiting sequence could enter once these victims have left, if it gets a place."""
        held, first = self.reservations, self._queue.next
        if sequence is not first and first.overtaken >= MAX_OVERTAKEN:
            return False
        coming = sum(held[sequence_id] for sequence_id in self._leaving)
        coming += sum(held[victim.sequence_id] for victim in victims)
        return not held.is_limited or held.capacity.needed_by(sequence) <= held.free + coming

    def _make_room(self) -> None:
        """Preempt sequences whose KV positions others need more."""
        if not self.reservations.is_limited:
            return
        for sequence in self._cramped.values():
            if self._claim(sequence, self.reservations.missing(sequence), is_inside=True):
                return
        is_stuck = self._cramped and not (self.ready or self._open_rounds or self._leaving)
        if is_stuck and self.occupied > 1:
            self._preempt(longest_of_largest(self.members, self.reservations))
        elif self._queue and self.capacity + len(self._leaving) and not (self._cramped and self._leaving):
            for sequence in islice(self._candidates(), MAX_OVERTAKEN):
                if self._claim(sequence, self.reservations.capacity.needed_by(sequence), is_inside=False):
                    return

    def _claim(self, claimant: Sequence, wanted: int, is_inside: bool) -> bool:
        """Preempt sequences until a sequence gets `wanted` more positions. Return whether it will."""
        held = self.reservations
        missing = wanted
        if is_inside or not self._cramped:  # otherwise cramped sequences get what is free
            missing -= held.free + sum(held[sequence_id] for sequence_id in self._leaving)
        for sequence in list(self._paused.values()):
            if missing > 0:
                missing -= held[sequence.sequence_id]
                self._preempt(sequence)
        if missing <= 0:
            return True
        members = list(self.members)
        victims = victims_for(claimant, wanted, missing, members, self._in_round.values(), held)
        if not victims and not is_inside and not self._queue.has_place(claimant):
            own = own_victim(claimant, wanted, missing, members, held)
            victims = [own] if own is not None else []
        for victim in victims:
            self._preempt(victim)
        return bool(victims)

    def _preempt(self, sequence: Sequence) -> None:
        sequence_id = sequence.sequence_id
        self._take_out(sequence_id)
        self._preempted[sequence_id] = sequence
        self._leaving.add(sequence_id)
        self._queue.leave(sequence_id)
        if self._shares_prefixes(sequence):
            cached = copy.copy(sequence)
            cached.finish, cached.target_prefix, cached.draft_prefix = Finish(FinishReason.ABORT), None, None
            self._prefixes.finish(cached)  # the workers keep it until they need the room
        sequence.preempt()

    def _requeue(self, sequence_id: int) -> None:
        """Queue a preempted sequence once its reader has caught up and its slot is released."""
        sequence = self._preempted.get(sequence_id)
        if sequence is not None and not sequence.paused and sequence_id not in self._leaving:
            del self._preempted[sequence_id]
            self._queue.add([sequence])

    def pause(self, sequence: Sequence) -> None:
        """Keep a sequence out of later rounds until `resume`. It holds its slot until another sequence needs it."""
        sequence.paused = True
        if sequence.sequence_id in self.ready:
            self._paused[sequence.sequence_id] = self.ready.pop(sequence.sequence_id)
        elif sequence.sequence_id in self._cramped:
            self._paused[sequence.sequence_id] = self._cramped.pop(sequence.sequence_id)

    def resume(self, sequence: Sequence) -> None:
        """Make a paused sequence ready again, behind all others. Queue it if it was preempted."""
        sequence.paused = False
        self._requeue(sequence.sequence_id)
        if self._paused.pop(sequence.sequence_id, None) is not None:
            self._make_ready(sequence)

    def begin_round(self, group: Iterable[Sequence]) -> None:
        """Take the group out of the ready set. Raises ValueError if any sequence is not ready."""
        group = list(group)
        if len({sequence.sequence_id for sequence in group if sequence.sequence_id in self.ready}) < len(group):
            raise ValueError("a group has a sequence that is not ready, or one twice")
        self.rounds += 1
        for sequence in group:
            sequence_id = sequence.sequence_id
            self._in_round[sequence_id] = self.ready.pop(sequence_id)
            self._open_rounds[sequence_id] = self._open_rounds.get(sequence_id, 0) + 1

    def round_sent(self, group: Iterable[Sequence]) -> None:
        """Make those sequences of the group ready that can continue before the round is answered."""
        for sequence in group:
            if sequence.sequence_id in self._in_round and sequence.can_continue:
                del self._in_round[sequence.sequence_id]
                self._make_ready(sequence)

    def hold(self, group: Iterable[Sequence]) -> list[Sequence]:
        """Put the ready sequences of a failed round back into it. Return the unfinished ones, to run again."""
        for sequence in group:
            if sequence.sequence_id in self.ready:
                self._in_round[sequence.sequence_id] = self.ready.pop(sequence.sequence_id)
        return [sequence for sequence in group if sequence.sequence_id in self._in_round and sequence.finish is None]

    def end_round(self, group: Iterable[Sequence]) -> None:
        """Make the unfinished sequences of the group ready, behind all others, unless they are in a later round."""
        for sequence in group:
            sequence_id = sequence.sequence_id
            open_rounds = self._open_rounds.pop(sequence_id) - 1
            if open_rounds:
                self._open_rounds[sequence_id] = open_rounds
            if sequence.finish is not None:
                if self._take_out(sequence_id):
                    self._leave(sequence)
                    self._forget(sequence)
                continue
            all_sent = open_rounds == len(sequence.pending)
            if sequence_id not in self._in_round or not all_sent or not sequence.can_continue:
                continue
            del self._in_round[sequence_id]
            self._make_ready(sequence)
            if sequence.lacks_room:  # another coordinator may need its slot
                sequence.lacks_room = False
                self._preempt(sequence)

    def _take_out(self, sequence_id: int) -> bool:
        """Take a sequence out of the window. Return whether it was there."""
        if sequence_id in self.ready:
            self.ready.pop(sequence_id)
            return True
        waiting = (self._in_round, self._parked, self._paused, self._cramped)
        return any(states.pop(sequence_id, None) is not None for states in waiting)

    def forget_target_caches(self) -> None:
        """Forget what the target worker has cached, after another process has replaced it."""
        for sequence in self.in_flight:
            is_ready = sequence.sequence_id in self.ready
            if is_ready:
                self.ready.pop(sequence.sequence_id)
            sequence.num_cached_tokens = 0
            sequence.pending.clear()
            if sequence.target_prefix is not None:
                sequence.target_prefix.source.num_cached_tokens = 0
            if is_ready:
                self.ready.add(sequence)
        self._prefixes.trim(0)

    def _leave(self, sequence: Sequence) -> None:
        self._leaving.add(sequence.sequence_id)
        sequence.target_prefix = sequence.draft_prefix = None  # otherwise chains of finished sequences stay in memory
        if self._shares_prefixes(sequence):
            self._prefixes.finish(sequence)

    def _forget(self, sequence: Sequence) -> None:
        """Remove the sample from its request. After an abort, another request may already use the same id."""
        key = sequence.request.key
        samples = self._by_request.get(key, {})
        samples.pop(sequence.sequence_id, None)
        if not samples:
            self._by_request.pop(key, None)

    def find(self, client: str, request_id: str) -> list[Sequence]:
        """The samples of a client's request that are in flight."""
        return list(self._by_request.get((client, request_id), {}).values())

    def abort(self, sequence: Sequence) -> None:
        """End an unfinished sequence in any state. In a round, it leaves after the round."""
        sequence_id, in_flight = sequence.sequence_id, self._by_request.get(sequence.request.key, {})
        if sequence_id not in in_flight or sequence.finish is not None:
            return
        sequence.finish = Finish(FinishReason.ABORT)
        sequence.pending.clear()
        self._forget(sequence)
        if self._preempted.pop(sequence_id, None) is not None:
            pass  # it holds no slot, or is already leaving
        elif sequence_id in self._queue:
            self._queue.discard(sequence)
        elif sequence_id not in self._in_round and self._take_out(sequence_id):
            self._leave(sequence)

    def released(self, sequence_ids: Iterable[int]) -> None:
        """Free the places of sequences whose slots the workers have released."""
        for sequence_id in self._leaving.intersection(sequence_ids):
            self._leaving.remove(sequence_id)
            self.background.discard(sequence_id)
            self.reservations.remove(sequence_id)
            self._queue.leave(sequence_id)
            self._requeue(sequence_id)

    def check_integrity(self) -> None:
        """Raise AssertionError if a sequence is in two states or a limit is exceeded."""
        self._queue.check_integrity()
        queued, ready = ({sequence.sequence_id for sequence in group} for group in (self._queue, self.ready))
        waiting = [set(self._parked), set(self._paused), set(self._cramped)]
        states = [queued, *waiting, ready, set(self._in_round), self._leaving]
        assert len(set().union(*states)) == sum(map(len, states)), "a sequence is in two states"
        assert sum(map(len, states[1:])) <= self.max_num_seqs, "the window is exceeded"
        self.reservations.check_integrity(set().union(*states[1:]))
        assert self._open_rounds.keys() <= set().union(*states[1:]), "a sequence outside the window is in a round"
        assert self._in_round.keys() <= self._open_rounds.keys(), "a sequence is in no round"
        assert all(sequence.paused for sequence in self._paused.values()), (
            "a sequence is parked as paused, but not paused"
        )
        assert not (self._preempted.keys() - self._leaving) & (set().union(*states)), "preempted and in the window"
        max_waiting = self.limits.samples + min(self.max_num_seqs, self.limits.samples)
        assert self._queue.newcomers <= max_waiting + self.capacity + len(self.background), "the queue is exceeded"
