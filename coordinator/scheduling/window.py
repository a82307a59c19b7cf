"""A window: the sequences that one target worker generates. Pure and synchronous.

A sequence is queued -> ready <-> in a round -> leaving -> gone. It can be ready again while its round runs, if the next
one can begin before the result is known. A leaving sequence still counts against the window, because the target worker
still holds its slot.

- Parked: waits for another sequence that is prefilling the same pages.
- Paused: waits for its reader to catch up.
- Cramped: waits for pages of the target's KV cache to continue.
- Preempted: taken out of the window for another sequence, and queued again.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain

from coordinator.scheduling.cache_events import CacheEvents
from coordinator.scheduling.capacity import HeldPages, KVCapacity
from coordinator.scheduling.grouping import ReadySet
from coordinator.scheduling.preemption import protect
from coordinator.scheduling.prefixes import PrefixIndex
from coordinator.scheduling.registry import Registry
from coordinator.scheduling.sequence import Sequence
from coordinator.scheduling.worker_time import Part, WorkerTime


class Window:
    """Generates at most `max_num_seqs` sequences at a time."""

    def __init__(
        self,
        max_num_seqs: int,
        registry: "Registry[Window]",
        *,
        preempts: bool = True,
        cache_events: CacheEvents | None = None,
    ) -> None:
        """`registry`: shared by all windows.

        `preempts`: whether sequences may be preempted for others. If all wait for pages, one is preempted in any case.
        `cache_events`: receives every change of the target worker's cached pages.
        """
        self.max_num_seqs, self.preempts = max_num_seqs, preempts
        self.registry, self._waiting = registry, registry.waiting
        registry.windows.append(self)
        self.is_open = True
        """Whether sequences may enter: the target worker is ready, and not about to be removed."""
        self.is_lost = False
        """Whether the target worker is unavailable, so that sequences should continue in other windows."""
        self.is_standby = False
        """Whether another window serves the requests while its target worker is ready."""
        self.follows_grammars = True
        self.admission_limit: Callable[[], int] = lambda: self.capacity
        """Returns how many sequences the grouping policy lets enter."""
        self.wake: Callable[[], None] = lambda: None
        """Called when there may be something to do."""
        self.slots = max_num_seqs
        """Slots of the target worker."""
        self.pages = HeldPages()
        self._worker_time = WorkerTime()
        self.rounds = 0
        self.parked: dict[int, Sequence] = {}
        self.paused: dict[int, Sequence] = {}
        self.cramped: dict[int, Sequence] = {}
        self.ready = ReadySet()
        self.in_round: dict[int, Sequence] = {}
        """Sequences in a round that cannot join another one yet."""
        self.open_rounds: dict[int, int] = {}
        """Rounds of each sequence that have begun and not ended."""
        self.leaving_ids: set[int] = set()
        self.background: set[int] = set()
        """Background sequences in the window. Requests that wait for their places do not count against the queue."""
        self._prefixes, self._cache_events = PrefixIndex(), cache_events

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences being generated."""
        in_round = sum(sequence.finish is None for sequence in self.in_round.values())
        return len(self.ready) + len(self.parked) + len(self.paused) + len(self.cramped) + in_round

    @property
    def schedulable(self) -> int:
        """Sequences that are ready or in a round."""
        return len(self.ready) + len(self.in_round)

    @property
    def occupied(self) -> int:
        """Places of the window in use, including leaving sequences."""
        return len(self.pages)

    @property
    def capacity(self) -> int:
        """Free places of the window."""
        return max(0, self.max_num_seqs - self.occupied)

    @property
    def coming(self) -> int:
        """Places that are free, or will be once leaving sequences have left."""
        return self.capacity + len(self.leaving_ids)

    @property
    def load(self) -> float:
        """Share of the places in use, 0 to 1."""
        return self.occupied / max(1, self.max_num_seqs)

    @property
    def kv_usage(self) -> float:
        """Share of the target worker's pages held by sequences, 0 to 1."""
        return self.pages.usage(self.slots)

    @property
    def members(self) -> Iterable[Sequence]:
        """Sequences in the window that are in no round."""
        return chain(self.ready, self.parked.values(), self.paused.values(), self.cramped.values())

    @property
    def eligible(self) -> ReadySet:
        """Ready sequences of the clients that may join the next round."""
        if not self.preempts:
            return self.ready
        clients = self._active_clients
        allowed = self._worker_time.may_run(clients)
        if len(allowed) == len(clients):
            return self.ready
        return ReadySet(s for s in self.ready if s.request.client in allowed or s.request.is_background)

    @property
    def _active_clients(self) -> set[str]:
        """Clients with sequences that are ready or in a round. Background sequences take no share of worker time."""
        active = chain(self.ready, self.in_round.values())
        return {sequence.request.client for sequence in active if not sequence.request.is_background}

    @property
    def newcomers(self) -> ReadySet:
        """Eligible sequences that the target worker has not seen."""
        in_round = self.open_rounds
        return ReadySet(s for s in self.eligible if not s.target.num_cached_tokens and s.sequence_id not in in_round)

    def add_round_time(self, parts: Mapping[str, Part], seconds: float, pass_seconds: Callable[[float], float]) -> None:
        """Count the time of a round that ends, by client: see `WorkerTime.add_round`."""
        active = self._active_clients
        self._worker_time.add_round(parts, seconds, pass_seconds, active | self._waiting.clients_without_place())

    @property
    def entering(self) -> list[Sequence]:
        """The next queued sequence, if it fits in the window."""
        return [self._waiting.next] if self._waiting and self.count_fitting([self._waiting.next]) else []

    @property
    def awaits_places(self) -> bool:
        """Whether sequences wait for the places of preempted ones that still hold slots."""
        return bool(self._waiting) and not self.leaving_ids.isdisjoint(self.registry.preempted)

    @property
    def leaving(self) -> set[int]:
        """Leaving sequences whose rounds have ended, so that their slots can be released."""
        return self.leaving_ids - self.open_rounds.keys()

    def has_other_rounds(self, group: Iterable[Sequence]) -> bool:
        """Whether a sequence of this group, which is in a round, is also in another round."""
        return any(self.open_rounds[sequence.sequence_id] > 1 for sequence in group)

    def count_fitting(self, waiting: Iterable[Sequence]) -> int:
        """Number of `waiting` sequences, in order, that fit into the window."""
        return self.pages.count_fitting(waiting, self.capacity)

    def prefix_length(self, sequence: Sequence) -> int:
        """Return how many leading tokens the target has cached, or will have soon; a multiple of the page size."""
        return self._prefixes.matched_length(sequence)

    def fit(self, slots: int, capacity: KVCapacity) -> None:
        """Adapt to the slots and pages of a target worker."""
        self.slots = slots
        self.pages.resize(capacity)
        if (capacity.page_size, capacity.pages) != (self._prefixes.page_size, self._prefixes.max_pages):
            self._forget_prefixes()

    def enter(self, sequence: Sequence) -> None:
        """Take a waiting sequence into the window."""
        self._prefixes.add(sequence)
        self.pages.add(sequence)
        self.registry.enter(sequence, self)  # last, so that an error above leaves the sequence queued
        if sequence.is_preempted:
            protect(sequence)
        sequence.is_preempted, sequence.overtaken = False, 0
        if sequence.request.is_background:
            self.background.add(sequence.sequence_id)
        self._park_or_make_ready(sequence)

    def _park_or_make_ready(self, sequence: Sequence) -> None:
        if self._prefixes.waits(sequence):
            self.parked[sequence.sequence_id] = sequence
        else:
            # The draft worker reports no evictions. Mostly, it has cached the same pages as the target.
            sequence.draft.predicted = self._prefixes.cached_length(sequence)
            self._make_ready(sequence)

    def settle(self) -> None:
        """Make sequences ready once their prefix is cached or their pages are free."""
        for sequence in list(self.parked.values()):
            if not self._prefixes.waits(sequence):
                self._prefixes.add(sequence)
                del self.parked[sequence.sequence_id]
                self._park_or_make_ready(sequence)
        for cramped in list(self.cramped.values()):
            if self.pages.grow(cramped):
                self.ready.add(self.cramped.pop(cramped.sequence_id))

    def _make_ready(self, sequence: Sequence) -> None:
        if sequence.paused:
            self.paused[sequence.sequence_id] = sequence
            return
        sequence.ready_since = self.rounds
        self._predict(sequence)
        if self.pages.grow(sequence):
            self.ready.add(sequence)
        else:
            self.cramped[sequence.sequence_id] = sequence

    def _predict(self, sequence: Sequence) -> None:
        """Predict how much of a prefilling sequence is in the target's prefix cache."""
        target = sequence.target
        if target.is_mispredicted:
            self._prefixes.mispredicted(sequence)
            self._prefixes.add(sequence)
            target.is_mispredicted = False
        if not sequence.is_decoding:
            target.fork = self._prefixes.fork_length(sequence)
            if not target.base_length % max(1, self._prefixes.page_size):
                target.predicted = self._prefixes.cached_length(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence out of the window for another one. It keeps its place until its slot is released."""
        sequence_id = sequence.sequence_id
        self._take_out(sequence_id)
        self.leaving_ids.add(sequence_id)
        self.registry.preempt(sequence)
        self._prefixes.discard(sequence)
        sequence.preempt()

    @property
    def idle(self) -> list[Sequence]:
        """Sequences in no round, including preempted ones that still hold a slot."""
        preempted = [s for s in self.registry.preempted.values() if s.sequence_id in self.leaving_ids]
        return [s for s in chain(self.members, preempted) if s.sequence_id not in self.open_rounds]

    def give_up(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences again, before others of their clients, without waiting for their slots."""
        sequences = list(sequences)
        for sequence in sequences:
            if not sequence.is_preempted:
                self.preempt(sequence)
        self.released([sequence.sequence_id for sequence in sequences], goes_first=True)

    def hold_back(self, sequence: Sequence) -> None:
        """Keep a paused sequence out of later rounds."""
        if sequence.sequence_id in self.ready:
            self.paused[sequence.sequence_id] = self.ready.pop(sequence.sequence_id)
        elif sequence.sequence_id in self.cramped:
            self.paused[sequence.sequence_id] = self.cramped.pop(sequence.sequence_id)

    def let_go(self, sequence: Sequence) -> None:
        """Make a resumed sequence ready again, behind all others."""
        if self.paused.pop(sequence.sequence_id, None) is not None:
            self._make_ready(sequence)

    def begin_round(self, group: Iterable[Sequence]) -> None:
        """Take the group out of the ready set. Raises ValueError if any sequence is not ready."""
        group = list(group)
        if len({sequence.sequence_id for sequence in group if sequence.sequence_id in self.ready}) < len(group):
            raise ValueError("a group has a sequence that is not ready, or one twice")
        self.rounds += 1
        for sequence in group:
            sequence_id = sequence.sequence_id
            self.in_round[sequence_id] = self.ready.pop(sequence_id)
            self.open_rounds[sequence_id] = self.open_rounds.get(sequence_id, 0) + 1

    def round_sent(self, group: Iterable[Sequence]) -> None:
        """Make those sequences of the group ready that can continue before the round is answered."""
        for sequence in group:
            if sequence.sequence_id in self.in_round and sequence.can_continue:
                del self.in_round[sequence.sequence_id]
                self._make_ready(sequence)

    def hold(self, group: Iterable[Sequence]) -> list[Sequence]:
        """Put the ready sequences of a failed round back into it. Return the unfinished ones, to run again."""
        for sequence in group:
            if sequence.sequence_id in self.ready:
                self.in_round[sequence.sequence_id] = self.ready.pop(sequence.sequence_id)
        return [sequence for sequence in group if sequence.sequence_id in self.in_round and sequence.finish is None]

    def end_round(self, group: Iterable[Sequence]) -> None:
        """Make the unfinished sequences of the group ready, behind all others, unless they are in a later round."""
        for sequence in group:
            sequence_id = sequence.sequence_id
            self._prefixes.commit(sequence)
            open_rounds = self.open_rounds.pop(sequence_id) - 1
            if open_rounds:
                self.open_rounds[sequence_id] = open_rounds
            if sequence.finish is not None:
                if self._take_out(sequence_id):
                    self._leave(sequence)
                    self.registry.forget(sequence)
                continue
            all_sent = open_rounds == len(sequence.target.pending)
            if sequence_id not in self.in_round or not all_sent or not sequence.can_continue:
                continue
            del self.in_round[sequence_id]
            self._make_ready(sequence)
            # Another coordinator may need its slot, and cramped sequences the pages that the worker refuses it.
            if sequence.target.settle_room() or (sequence.target.had_no_slot and self.cramped):
                self.preempt(sequence)

    def _take_out(self, sequence_id: int) -> bool:
        """Take a sequence out of the window. Return whether it was there."""
        if sequence_id in self.ready:
            self.ready.pop(sequence_id)
            return True
        waiting = (self.in_round, self.parked, self.paused, self.cramped)
        return any(states.pop(sequence_id, None) is not None for states in waiting)

    def forget_target_caches(self) -> None:
        """Forget what the target worker has cached, after another process has replaced it."""
        self._forget_prefixes()
        for sequence in list(chain(self.members, self.in_round.values())):
            is_ready = sequence.sequence_id in self.ready
            if is_ready:
                self.ready.pop(sequence.sequence_id)
            sequence.target.replace_worker()
            if is_ready:
                self.ready.add(sequence)

    def _forget_prefixes(self) -> None:
        """Forget the target worker's prefix cache. Sequences prefill their pages again."""
        self._prefixes.clear()
        capacity = self.pages.capacity
        self._prefixes = PrefixIndex(capacity.page_size, capacity.pages, self._cache_events)
        for sequence in chain(self.members, self.in_round.values()):
            self._prefixes.add(sequence)

    def forget_pages(self, digests: Iterable[bytes]) -> None:
        """Record that the target worker's prefix cache has evicted pages."""
        self._prefixes.evict(digests)

    def _leave(self, sequence: Sequence) -> None:
        self.leaving_ids.add(sequence.sequence_id)
        self._prefixes.discard(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Let an aborted sequence leave the window, after its round."""
        if sequence.sequence_id not in self.in_round and self._take_out(sequence.sequence_id):
            self._leave(sequence)

    def released(self, sequence_ids: Iterable[int], goes_first: bool = False) -> None:
        """Free the places of sequences whose slots the workers have released.

        `goes_first`: queue the preempted ones before other requests of their clients.
        """
        for sequence_id in self.leaving_ids.intersection(sequence_ids):
            self.leaving_ids.remove(sequence_id)
            self.background.discard(sequence_id)
            self.pages.remove(sequence_id)
            self.registry.release(sequence_id, goes_first)

    def check_integrity(self) -> None:
        """Raise AssertionError if a sequence is in two states or a limit is exceeded."""
        self.registry.check_integrity()
        queued, ready = ({sequence.sequence_id for sequence in group} for group in (self._waiting, self.ready))
        waiting = [set(self.parked), set(self.paused), set(self.cramped)]
        states = [queued, *waiting, ready, set(self.in_round), self.leaving_ids]
        assert len(set().union(*states)) == sum(map(len, states)), "a sequence is in two states"
        assert sum(map(len, states[1:])) <= self.max_num_seqs, "the window is exceeded"
        self.pages.check_integrity(set().union(*states[1:]))
        self._prefixes.check_integrity(set().union(*states[1:]) - self.leaving_ids)
        assert self.open_rounds.keys() <= set().union(*states[1:]), "a sequence outside the window is in a round"
        assert self.in_round.keys() <= self.open_rounds.keys(), "a sequence is in no round"
        assert not any(sequence.finish for sequence in self.ready), "a finished sequence is ready"
        assert all(sequence.paused for sequence in self.paused.values()), "a sequence is wrongly held as paused"
        preempted = self.registry.preempted.keys() - self.leaving_ids
        assert not preempted & set().union(*states), "preempted and in the window"
