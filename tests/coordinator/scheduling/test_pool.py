"""The pool against a model of itself: arbitrary arrivals, rounds, endings and aborts, in any order."""

import math
from collections.abc import Iterable
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.scheduling.capacity import KVCapacity
from coordinator.scheduling.grouping import GroupingLimits, Ragged
from coordinator.scheduling.pool import DuplicateRequestError, Pool, PoolFullError
from coordinator.scheduling.sequence import FinishReason, GenerationRequest, Prefix, Sequence

# Few, so that ids are used again, as clients do: also while an aborted namesake is still in its round.
REQUEST_IDS = st.sampled_from("abcdefgh")


# Prompts that begin alike or do not, in lengths around the blocks in which that is noticed.
PROMPTS = st.tuples(st.integers(0, 1), st.sampled_from([1, 15, 17, 40])).map(lambda prompt: (prompt[0],) * prompt[1])


def make_sequence(
    sequence_id: int, request_id: str | None = None, max_tokens: int = 3, prompt: tuple[int, ...] = (1,)
) -> Sequence:
    return Sequence(sequence_id, GenerationRequest(request_id or str(sequence_id), prompt, max_tokens, frozenset(), 4))


class PoolMachine(RuleBasedStateMachine):
    """`waiting` and `inside` are what the pool should hold; `group` plays a round."""

    @initialize(
        window_size=st.integers(1, 4),
        queue_size=st.integers(0, 4),
        positions=st.sampled_from([0, 1, 20, 40, 90]),
        multiple=st.sampled_from([0, 1, 16]),
    )
    def start(self, window_size: int, queue_size: int, positions: int, multiple: int) -> None:
        self.pool = Pool(window_size, queue_size)
        self.pool.kv_capacity = KVCapacity(positions, multiple)
        self.kept: dict[int, int] = {}
        self.ids = count(1)
        self.waiting: list[Sequence] = []
        self.inside: list[Sequence] = []
        self.left: set[int] = set()
        self.group: list[Sequence] = []

    def in_flight(self) -> list[Sequence]:
        return self.waiting + [sequence for sequence in self.inside if sequence.finish is None]

    def room(self) -> int:
        return self.pool.window_size - len(self.inside) - len(self.left)

    def next_to_enter(self, waiting: list[Sequence]) -> list[Sequence]:
        for sequence_id in set(self.kept) - {sequence.sequence_id for sequence in self.inside} - self.left:
            del self.kept[sequence_id]
        entering: list[Sequence] = []
        taken = sum(self.kept.values())
        for sequence in waiting[: self.room()]:
            taken += self.pool.kv_capacity.taken_by(sequence)
            if (self.kept or entering) and 0 < self.pool.kv_capacity.positions < taken:
                break
            entering.append(sequence)
        return entering

    def parked(self) -> list[Sequence]:
        return [s for s in self.inside if s.target_prefix is not None and s.target_prefix.is_coming]

    @rule(request_id=REQUEST_IDS, prompt=PROMPTS, n=st.sampled_from([1, 1, 1, 2, 3]))
    def submit(self, request_id: str, prompt: tuple[int, ...], n: int) -> None:
        samples = [make_sequence(next(self.ids), request_id, prompt=prompt) for _ in range(n)]
        for other in samples[1:]:
            other.target_prefix = Prefix(samples[0], len(prompt) - 1)
        if any(other.request.request_id == request_id for other in self.in_flight()):
            with pytest.raises(DuplicateRequestError):
                self.pool.submit(samples)
        elif len(self.waiting) + n > self.pool.queue_size + len(self.next_to_enter([*self.waiting, *samples])):
            with pytest.raises(PoolFullError):
                self.pool.submit(samples)
        else:
            self.pool.submit(samples)
            self.waiting += samples

    @rule()
    def admit(self) -> None:
        expected = self.next_to_enter(self.waiting)
        self.kept.update((sequence.sequence_id, self.pool.kv_capacity.taken_by(sequence)) for sequence in expected)
        assert self.pool.admit() == expected
        self.inside += expected
        del self.waiting[: len(expected)]

    @precondition(lambda self: not self.group)
    @rule(limit=st.integers(1, 4))
    def begin_round(self, limit: int) -> None:
        self.group = Ragged(GroupingLimits(limit)).choose(self.pool.ready, self.pool.rounds).sequences
        self.pool.begin_round(self.group)

    @precondition(lambda self: self.group)
    @rule(gained=st.integers(0, 3))
    def end_round(self, gained: int) -> None:
        for sequence in self.group:
            if sequence.finish is None:
                sequence.target_length = len(sequence.token_ids) - 1
                sequence.target_prefix = None
                sequence.commit([0] * gained)
        self.pool.end_round(self.group)
        for sequence in self.group:
            if sequence.finish is not None:
                self.inside.remove(sequence)
                self.left.add(sequence.sequence_id)
        self.group = []

    @precondition(lambda self: self.in_flight())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.in_flight()))
        self.pool.abort(sequence)
        assert sequence.finish is not None
        assert sequence.finish.reason is FinishReason.ABORT
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence not in self.group:
            self.inside.remove(sequence)
            self.left.add(sequence.sequence_id)

    @rule()
    def release(self) -> None:
        leaving = self.pool.leaving
        assert leaving == self.left
        self.pool.released(leaving)
        self.left.clear()

    @invariant()
    def holds_what_it_should(self) -> None:
        self.pool.check_integrity()
        assert self.pool.queued == len(self.waiting)
        assert self.pool.running == len(self.in_flight()) - len(self.waiting)
        idle = {sequence for sequence in self.inside if sequence not in self.group}
        # Who was parked is ready at the next admission after what it waited for has come.
        assert idle - set(self.parked()) >= set(self.pool.ready)
        assert set(self.pool.members) == idle
        for sequence in self.in_flight():
            assert sequence in self.pool.find(sequence.request.request_id)

    def teardown(self) -> None:
        """Whatever happened before, rounds of one sequence at a time finish all."""
        if not hasattr(self, "pool"):
            return
        everybody = self.in_flight()
        if self.group:
            self.end_round(1)
        for _ in range(5 * len(everybody) + 1):
            self.release()
            self.admit()
            self.begin_round(1)
            if self.group:
                self.end_round(1)
            self.holds_what_it_should()
        assert all(sequence.finish is not None for sequence in everybody)
        assert (self.pool.running, self.pool.queued) == (0, 0)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def filled(window_size: int, number: int, queue_size: int = 100) -> tuple[Pool, list[Sequence]]:
    pool = Pool(window_size, queue_size)
    sequences = [make_sequence(i, max_tokens=1000) for i in range(number)]
    for sequence in sequences:
        pool.submit([sequence])
    return pool, sequences


def test_admission_is_first_come_first_served() -> None:
    pool, sequences = filled(window_size=3, number=7)
    assert pool.admit() == sequences[:3]
    assert pool.admit() == []
    pool.abort(sequences[1])
    pool.abort(sequences[4])
    pool.released(pool.leaving)
    assert pool.admit() == [sequences[3]]
    assert list(pool.ready) == [sequences[0], sequences[2], sequences[3]]


@pytest.mark.parametrize(("window", "limit"), [(1, 1), (5, 2), (7, 3), (4, 8)])
def test_nobody_waits_longer_than_one_turn_of_the_others(window: int, limit: int) -> None:
    pool, sequences = filled(window, number=window)
    pool.admit()
    last_played = dict.fromkeys(sequences, 0)
    for turn in range(1, 40):
        group = Ragged(GroupingLimits(limit)).choose(pool.ready, pool.rounds).sequences
        pool.begin_round(group)
        pool.end_round(group)
        last_played.update(dict.fromkeys(group, turn))
        assert turn - min(last_played.values()) <= math.ceil(window / limit)


def test_a_leaving_sequence_counts_until_its_slot_is_free() -> None:
    pool, sequences = filled(window_size=1, number=2)
    pool.admit()
    pool.abort(sequences[0])
    assert pool.admit() == []
    assert (pool.running, pool.queued, pool.leaving) == (0, 1, {0})
    pool.released({0})
    assert pool.admit() == [sequences[1]]


def test_an_abort_in_a_round_leaves_at_its_end() -> None:
    pool, (sequence,) = filled(window_size=1, number=1)
    pool.admit()
    pool.begin_round([sequence])
    pool.abort(sequence)
    assert pool.leaving == set()
    pool.end_round([sequence])
    assert pool.leaving == {0}
    assert list(pool.ready) == []


def test_a_request_id_can_be_used_again_while_its_aborted_namesake_is_in_a_round() -> None:
    pool, (old,) = filled(window_size=2, number=1)
    pool.admit()
    pool.begin_round([old])
    pool.abort(old)
    new = make_sequence(1, old.request.request_id)
    pool.submit([new])
    pool.end_round([old])
    assert pool.find(new.request.request_id) == [new]
    assert (pool.running, pool.queued) == (0, 1)


def test_a_duplicate_request_id_is_refused_and_changes_nothing() -> None:
    pool, (sequence,) = filled(window_size=1, number=1)
    with pytest.raises(DuplicateRequestError):
        pool.submit([make_sequence(7, sequence.request.request_id)])
    assert pool.find(sequence.request.request_id) == [sequence]
    assert pool.queued == 1


def test_without_a_queue_the_window_still_serves() -> None:
    pool, sequences = filled(window_size=2, number=2, queue_size=0)
    with pytest.raises(PoolFullError):
        pool.submit([make_sequence(9)])
    assert pool.admit() == sequences
    with pytest.raises(PoolFullError):
        pool.submit([make_sequence(9)])


def test_aborting_twice_or_after_the_end_does_nothing() -> None:
    pool, (sequence,) = filled(window_size=1, number=1)
    pool.admit()
    pool.begin_round([sequence])
    sequence.commit([0] * 1000)
    pool.abort(sequence)
    pool.end_round([sequence])
    pool.abort(sequence)
    assert sequence.finish is not None
    assert sequence.finish.reason is FinishReason.LENGTH
    assert pool.leaving == {0}


def sharing(pool: Pool, ids: Iterable[int], prompt: tuple[int, ...] = (5,) * 40) -> list[Sequence]:
    """Sequences of the same prompt, submitted."""
    sequences = [make_sequence(i, max_tokens=2, prompt=prompt) for i in ids]
    for sequence in sequences:
        pool.submit([sequence])
    return sequences


def prefill(pool: Pool, sequence: Sequence, length: int) -> None:
    pool.begin_round([sequence])
    sequence.target_length = length
    pool.end_round([sequence])


def test_who_begins_as_another_does_waits_until_the_shared_part_was_worked_off() -> None:
    pool = Pool(4, 9)
    first, second, longer = [*sharing(pool, [1, 2]), *sharing(pool, [3], (5,) * 20 + (6,) * 20)]
    pool.admit()
    assert list(pool.ready) == [first]
    prefill(pool, first, 20)
    pool.admit()
    assert list(pool.ready) == [first, longer]
    prefill(pool, first, 39)
    pool.admit()
    assert list(pool.ready) == [longer, first, second]
    assert (second.target_base, longer.target_base) == (39, 20)


def test_nobody_waits_for_one_that_was_aborted() -> None:
    pool = Pool(4, 9)
    first, second = sharing(pool, [1, 2])
    pool.admit()
    pool.abort(first)
    pool.admit()
    assert list(pool.ready) == [second]
    assert second.target_base == 0


def test_without_prefix_reuse_nobody_waits_and_nothing_is_copied() -> None:
    pool = Pool(4, 9, prefix_reuse=False)
    sequences = sharing(pool, [1, 2])
    pool.admit()
    assert list(pool.ready) == sequences
    assert [sequence.target_prefix for sequence in sequences] == [None, None]


def test_finished_sequences_are_prefixes_while_there_are_slots_for_them() -> None:
    pool = Pool(1, 9, slots=2)
    sources = []
    for i, prompt in enumerate([(5,) * 40, (6,) * 40, (7,) * 40]):
        (sequence,) = sharing(pool, [i], prompt)
        pool.admit()
        prefill(pool, sequence, 39)
        pool.begin_round([sequence])
        sequence.commit([1, 1])
        pool.end_round([sequence])
        pool.released({i})
        sources.append(sequence)
    again = [*sharing(pool, [8], (7,) * 40 + (1, 1, 2)), *sharing(pool, [9], (5,) * 40)]
    pool.admit()
    assert again[0].target_prefix == Prefix(sources[2], 42)
    assert again[0].target_base == 39
    pool.abort(again[0])
    pool.released({8})
    pool.admit()
    assert again[1].target_prefix is None


def test_finished_sequences_keep_no_others_alive() -> None:
    """A prefix names its source, which had a source of its own: whole histories would never be freed."""
    pool = Pool(1, 9, slots=9)
    for i in range(3):
        (sequence,) = sharing(pool, [i])
        pool.admit()
        prefill(pool, sequence, 39)
        pool.abort(sequence)
        pool.released({i})
        assert sequence.target_prefix is sequence.draft_prefix is None
