"""The pool against a model of itself: arbitrary arrivals, rounds, endings and aborts, in any order."""

import math
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.grouping import GroupingLimits, Ragged
from coordinator.pool import DuplicateRequestError, Pool, PoolFullError
from coordinator.sequence import FinishReason, GenerationRequest, Sequence

# Few, so that ids are used again, as clients do: also while an aborted namesake is still in its round.
REQUEST_IDS = st.sampled_from("abcdefgh")


def make_sequence(sequence_id: int, request_id: str | None = None, max_tokens: int = 3) -> Sequence:
    return Sequence(sequence_id, GenerationRequest(request_id or str(sequence_id), (1,), max_tokens, frozenset(), 4))


class PoolMachine(RuleBasedStateMachine):
    """`waiting` and `inside` are what the pool should hold; `group` plays a round."""

    @initialize(window_size=st.integers(1, 4), queue_size=st.integers(0, 4))
    def start(self, window_size: int, queue_size: int) -> None:
        self.pool = Pool(window_size, queue_size)
        self.ids = count(1)
        self.waiting: list[Sequence] = []
        self.inside: list[Sequence] = []
        self.left: set[int] = set()
        self.group: list[Sequence] = []

    def in_flight(self) -> list[Sequence]:
        return self.waiting + [sequence for sequence in self.inside if sequence.finish is None]

    def room(self) -> int:
        return self.pool.window_size - len(self.inside) - len(self.left)

    @rule(request_id=REQUEST_IDS)
    def submit(self, request_id: str) -> None:
        sequence = make_sequence(next(self.ids), request_id)
        if any(other.request.request_id == request_id for other in self.in_flight()):
            with pytest.raises(DuplicateRequestError):
                self.pool.submit(sequence)
        elif len(self.waiting) >= self.pool.queue_size + self.room():
            with pytest.raises(PoolFullError):
                self.pool.submit(sequence)
        else:
            self.pool.submit(sequence)
            self.waiting.append(sequence)

    @rule()
    def admit(self) -> None:
        expected = self.waiting[: self.room()]
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
        assert set(self.pool.ready) == {sequence for sequence in self.inside if sequence not in self.group}
        for sequence in self.in_flight():
            assert self.pool.find(sequence.request.request_id) is sequence

    def teardown(self) -> None:
        """Whatever happened before, rounds of one sequence at a time finish all."""
        if not hasattr(self, "pool"):
            return
        everybody = self.in_flight()
        if self.group:
            self.end_round(1)
        for _ in range(4 * len(everybody) + 1):
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
        pool.submit(sequence)
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
    pool.submit(new)
    pool.end_round([old])
    assert pool.find(new.request.request_id) is new
    assert (pool.running, pool.queued) == (0, 1)


def test_a_duplicate_request_id_is_refused_and_changes_nothing() -> None:
    pool, (sequence,) = filled(window_size=1, number=1)
    with pytest.raises(DuplicateRequestError):
        pool.submit(make_sequence(7, sequence.request.request_id))
    assert pool.find(sequence.request.request_id) is sequence
    assert pool.queued == 1


def test_without_a_queue_the_window_still_serves() -> None:
    pool, sequences = filled(window_size=2, number=2, queue_size=0)
    with pytest.raises(PoolFullError):
        pool.submit(make_sequence(9))
    assert pool.admit() == sequences
    with pytest.raises(PoolFullError):
        pool.submit(make_sequence(9))


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
